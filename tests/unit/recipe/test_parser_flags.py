"""The files of `lockfiles/flags`: written and read, found by image, and true to what is locked."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.app.recipes import images_alike
from pipeline.core.errors import RecipeInvalid
from pipeline.core.model import Engine
from pipeline.core.yaml_file import read_yaml
from pipeline.images.assemble.golden import read_golden
from pipeline.images.assemble.plan import plan_image
from pipeline.images.engine.parser_flags import (
    FlagSpec,
    ParserFlags,
    find_parser_flags,
    flags_folder,
    write_parser_flags,
)
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.flags import Flags, LlamaFlags, SglangFlags, VllmFlags
from pipeline.serving.recipe.launch import Launch, NodePlace, Overrides, on_node, plan_launch
from pipeline.serving.recipe.model import ContainerSpec
from pipeline.serving.recipe.parser import check_flags, require_known_flags, split_command_line

CHECKOUT = Checkout(Path(__file__).parents[3])
COMMITTED = sorted(path.stem for path in flags_folder(CHECKOUT).glob("*.yaml"))
RECIPES = Recipes([CHECKOUT.root / "recipes"])
DIGEST = f"sha256:{'7' * 64}"


def parser(**fields: object) -> ParserFlags:
    body = {
        "engine": "vllm",
        "version": "0.32.0",
        "image": "vllm",
        "digest": DIGEST,
        "read_from": "the image",
        "syntax": "vllm",
        "flags": {"-b": FlagSpec(takes="none"), "--a": FlagSpec(takes="one", choices=["on", "1"])},
    }
    return ParserFlags.model_validate({**body, **fields})


def test_a_parser_is_written_sorted_and_read_back(tmp_path: Path) -> None:
    flags = parser(variables=["VLLM_B", "VLLM_A"], exclusive=[["--a", "-b"]])
    path = write_parser_flags(tmp_path / "flags", flags)
    text = path.read_text()
    assert text.index("--a") < text.index("  -b")
    assert text.endswith("variables:\n- VLLM_A\n- VLLM_B\n")
    # `on` and `1` stay the texts that they are
    assert read_yaml(path, ParserFlags) == flags.model_copy(
        update={"variables": ["VLLM_A", "VLLM_B"]}
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"digest": None},
        {"tree": DIGEST},
        {"digest": "latest"},
        {"flags": {"max-model-len": {"takes": "one"}}},
        {"flags": {"--a": {"takes": "two"}}},
        {"flags": {"--a": {"takes": "one", "default": 1}}},
        {"built": "yesterday"},
    ],
)
def test_a_file_that_says_too_little_or_too_much_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        parser(**wrong)


def test_flags_are_found_by_the_image_and_without_one_by_the_engine(tmp_path: Path) -> None:
    write_parser_flags(tmp_path, parser(also=["vllm-nccl"]))
    other = parser(image="vllm-old", version="0.1")
    write_parser_flags(tmp_path, other)
    assert find_parser_flags(tmp_path, "vllm", "vllm-nccl").image == "vllm"
    assert find_parser_flags(tmp_path, "vllm", "vllm-old") == other
    assert find_parser_flags(tmp_path, "vllm", None).image == "vllm"


@pytest.mark.parametrize(("engine", "image"), [("vllm", "vllm-new"), ("sglang", None)])
def test_an_image_whose_parser_nobody_read_is_no_guess(
    tmp_path: Path, engine: str, image: str | None
) -> None:
    write_parser_flags(tmp_path, parser())
    with pytest.raises(RecipeInvalid, match=f"which flags {image or engine} accepts"):
        find_parser_flags(tmp_path, engine, image)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", COMMITTED)
def test_a_committed_parser_is_that_of_the_image_of_today(name: str) -> None:
    """Fails when an image has moved on: `sm120 recipe flags IMAGE --accept` reads it again."""
    flags = read_yaml(flags_folder(CHECKOUT) / f"{name}.yaml", ParserFlags)
    assert flags.image == name
    assert flags.also == images_alike(CHECKOUT, name)
    plan = plan_image(CHECKOUT, name, flags.platform or CHECKOUT.spec(name).platforms[0])
    if flags.digest:
        golden = read_golden(CHECKOUT.golden_path).images[f"{name}.{plan.architecture}"]
        assert flags.digest == golden.digest
    elif flags.tree:
        assert flags.tree in [tree.lock.tree for tree in plan.all_trees()]
    else:
        assert flags.wheel in [f"sha256:{wheel.sha256}" for wheel in plan.lock.wheels]


@pytest.mark.parametrize("name", RECIPES.names())
def test_a_shipped_recipe_has_no_flag_that_its_engine_does_not_know(name: str) -> None:
    recipe = RECIPES.read(name)
    flags = find_parser_flags(flags_folder(CHECKOUT), recipe.engine, recipe.image)
    path = "/weights/model.gguf" if recipe.engine in ("ik-llama", "llama-cpp") else "/weights"
    choices = [Overrides(model_path=path)]
    if recipe.speculation:
        choices.append(Overrides(model_path=path, enable_eagle3=True))
        choices.append(Overrides(model_path=path, enable_eagle3=False))
    for overrides in choices:
        launch = plan_launch(recipe, overrides, weights="/weights", draft="/draft")
        more = range(recipe.nodes) if recipe.nodes > 1 else ()
        ranks = [on_node(launch, NodePlace(n, "A", "A")) for n in more]
        for each in ranks or [launch]:
            assert [str(problem) for problem in check_flags(each, flags)] == []


@pytest.mark.parametrize(
    ("kind", "engines"),
    [(VllmFlags, {"vllm"}), (SglangFlags, {"sglang"}), (LlamaFlags, {"ik-llama", "llama-cpp"})],
)
def test_every_typed_field_is_a_flag_of_some_engine_here(
    kind: type[Flags], engines: set[str]
) -> None:
    parsers = [
        read_yaml(flags_folder(CHECKOUT) / f"{name}.yaml", ParserFlags) for name in COMMITTED
    ]
    own = [each for each in parsers if each.engine in engines]
    names = [kind.flag(field) for field in kind.model_fields if field != "extra"]
    # as a command line has it: `--tp` is the beginning of a flag
    lines = {
        name: [split_command_line([name], each).given[0].name for each in own] for name in names
    }
    assert [name for name, found in lines.items() if not any(found)] == []


INVENTED = {
    "vllm": ("--max-model-length", "--max-model-len"),
    "sglang": ("--contxt-length", "--context-length"),
    "ik-llama": ("--override-tensors", "--override-tensor"),
    "llama-cpp": ("--override-tensors", "--override-tensor"),
}


@pytest.mark.parametrize("engine", INVENTED)
def test_an_invented_flag_is_refused_for_each_engine_with_the_nearest_name(engine: Engine) -> None:
    """By the real parsers, and only for the flag: the same launch without it passes."""
    flag, nearest = INVENTED[engine]
    launch = Launch(
        recipe="one",
        engine=engine,
        image=None,
        program=[],
        arguments=["--port", "8000"],
        environment={},
        mounts=[],
        port=8000,
        cards=1,
        container=ContainerSpec(),
        model="m",
    )
    require_known_flags(CHECKOUT, launch)
    wrong = launch.model_copy(update={"arguments": [*launch.arguments, flag, "1"]})
    with pytest.raises(RecipeInvalid, match=f"is no flag of .* did you mean {nearest}"):
        require_known_flags(CHECKOUT, wrong)
