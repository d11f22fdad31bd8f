"""From a recipe and a user's overrides to one exact command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.containers.arguments import Mount
from pipeline.core.errors import RecipeInvalid
from pipeline.serving.recipe.launch import Launch, Overrides, plan_launch, read_overrides
from pipeline.serving.recipe.model import Recipe
from tests.unit.recipe.bodies import DRAFTS, recipe

ALL = [name.upper() for name in Overrides.model_fields]
ENGINES = ["vllm", "sglang", "ik-llama"]
FOLDER = {"repository": "some/model-GGUF", "folder": "Q4_X", "name": "m"}


def launched(given: Recipe, draft: str = "", **overrides: Any) -> Launch:
    return plan_launch(given, Overrides(**overrides), weights="/w", draft=draft)


def value_of(launch: Launch, flag: str) -> str:
    assert launch.arguments.count(flag) == 1, launch.arguments
    return launch.arguments[launch.arguments.index(flag) + 1]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (
            "vllm",
            "/models --served-model-name m --port 8000 --tensor-parallel-size 2 "
            "--max-model-len 4096",
        ),
        ("sglang", "--model-path /models --served-model-name m --port 8000 --ep-size 2"),
        (
            "ik-llama",
            "-m /models/a/b-00001-of-00003.gguf --alias m --port 8000 -mla 3 -ot a=CUDA0 "
            "-ot exps=CPU",
        ),
    ],
)
def test_a_recipe_is_one_command_of_its_engine(engine: str, words: str) -> None:
    launch = launched(recipe(engine))
    assert launch.arguments == words.split()
    assert launch.mounts == [Mount(host="/w", inside="/models", read_only=True)]


@pytest.mark.parametrize(
    ("engine", "program", "model"),
    [
        ("vllm", ["vllm", "serve"], "/w"),
        ("sglang", ["python3", "-m", "sglang.launch_server"], "/w"),
        ("ik-llama", ["llama-server"], "/w/a/b-00001-of-00003.gguf"),
    ],
)
def test_without_an_image_the_engine_reads_the_host_s_files(
    engine: str, program: list[str], model: str
) -> None:
    launch = launched(recipe(engine, image=None))
    assert (launch.program, launch.mounts, launch.image) == (program, [], None)
    assert model in launch.arguments[:2]


def test_a_launch_says_all_that_a_container_needs() -> None:
    given = recipe(
        environment={"paper": {"A": "1"}, "us": {"B": "2"}},
        container={"capabilities": ["SYS_NICE"], "ipc": "private"},
        host="0.0.0.0",
    )
    launch = plan_launch(given, Overrides(), weights="/w", digest=f"sha256:{'0' * 64}")
    assert launch.environment == {"A": "1", "B": "2"}
    assert (launch.cards, launch.port, launch.model) == (2, 8000, "m")
    assert launch.container.capabilities == ["SYS_NICE"]
    assert value_of(launch, "--host") == "0.0.0.0"
    assert str(launch.digest).endswith("000")


@pytest.mark.parametrize(
    ("engine", "context", "name"),
    [
        ("vllm", "--max-model-len", "--served-model-name"),
        ("sglang", "--context-length", "--served-model-name"),
        ("ik-llama", "--ctx-size", "--alias"),
    ],
)
def test_overrides_take_the_place_of_each_engine_s_flags(
    engine: str, context: str, name: str
) -> None:
    launch = launched(recipe(engine), max_model_len=512, served_model_name="new", port=9)
    assert (value_of(launch, context), value_of(launch, name)) == ("512", "new")
    assert (value_of(launch, "--port"), launch.port, launch.model) == ("9", 9, "new")


@pytest.mark.parametrize(
    ("engine", "flag"), [("vllm", "--gpu-memory-utilization"), ("sglang", "--mem-fraction-static")]
)
def test_the_share_of_memory_is_each_engine_s_own_flag(engine: str, flag: str) -> None:
    assert value_of(launched(recipe(engine), gpu_memory_utilization=0.5), flag) == "0.5"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"gpu_memory_utilization": 0.5}, "GPU_MEMORY_UTILIZATION means nothing to ik-llama"),
        ({"enable_eagle3": True}, "has no speculation to turn on"),
        ({"eagle3_model": "some/draft"}, "has no speculation to turn on"),
        ({"model_path": "some/model"}, "MODEL_PATH: is 'some/model'"),
        ({"model_path": "b.gguf"}, "MODEL_PATH: is 'b.gguf'"),
    ],
)
def test_an_override_that_means_nothing_to_the_engine_is_refused(
    overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeInvalid) as refused:
        launched(recipe("ik-llama"), **overrides)
    assert message in str(refused.value)
    assert refused.value.hint


def test_turning_off_what_is_not_there_changes_nothing() -> None:
    assert launched(recipe(), enable_eagle3=False) == launched(recipe())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_folder_of_the_host_is_mounted_in_place_of_the_weights(engine: str) -> None:
    path = "/other/x-00001-of-00002.gguf" if engine == "ik-llama" else "/other"
    launch = launched(recipe(engine), model_path=path)
    assert launch.mounts == [Mount(host="/other", inside="/models")]
    assert path.replace("/other", "/models") in launch.arguments[:2]
    alone = launched(recipe(engine, image=None), model_path=path)
    assert (alone.mounts, path in alone.arguments[:2]) == ([], True)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_name_of_the_hub_is_given_to_the_engine_and_nothing_mounted(engine: str) -> None:
    launch = launched(recipe(engine), model_path="some/Other-1.5")
    assert (launch.mounts, "some/Other-1.5" in launch.arguments[:2]) == ([], True)


@pytest.mark.parametrize("path", ["relative", "./here", "a/b/c", "~/models", "a/b "])
def test_a_path_that_is_neither_is_refused(path: str) -> None:
    with pytest.raises(RecipeInvalid, match="MODEL_PATH: is") as refused:
        launched(recipe(), model_path=path)
    assert "organisation/model or a whole path" in str(refused.value.hint)


def test_the_first_part_of_a_model_is_found_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "Q4_X").mkdir()
    for part in (1, 2, 3):
        (tmp_path / "Q4_X" / f"m-0000{part}-of-00003.gguf").touch()
    given = recipe("ik-llama", model=FOLDER)
    launch = plan_launch(given, Overrides(), weights=str(tmp_path))
    assert value_of(launch, "-m") == "/models/Q4_X/m-00001-of-00003.gguf"


@pytest.mark.parametrize("names", [[], ["m-00002-of-00002.gguf"], ["a-00001-of-2.gguf"] * 2])
def test_no_first_part_or_two_of_them_are_refused(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "Q4_X").mkdir()
    for number, name in enumerate(names):
        (tmp_path / "Q4_X" / f"{number}{name}").touch()
    given = recipe("ik-llama", model=FOLDER)
    with pytest.raises(RecipeInvalid, match="are a first part"):
        plan_launch(given, Overrides(), weights=str(tmp_path))
    named = plan_launch(given, Overrides(model_path="/x/y.gguf"), weights=str(tmp_path))
    assert value_of(named, "-m") == "/models/y.gguf"


def test_drafts_are_off_until_they_are_turned_on() -> None:
    given = recipe(speculation=DRAFTS)
    assert "--speculative-config" not in launched(given, draft="/d").arguments
    on = launched(given, draft="/d", enable_eagle3=True)
    assert json.loads(value_of(on, "--speculative-config")) == {
        "method": "eagle3",
        "model": "/draft",
        "num_speculative_tokens": 3,
    }
    assert on.mounts[1:] == [Mount(host="/d", inside="/draft")]


def test_drafts_that_are_on_can_be_turned_off() -> None:
    given = recipe(speculation=DRAFTS | {"enabled": True})
    assert "--speculative-config" in launched(given, draft="/d").arguments
    off = launched(given, draft="/d", enable_eagle3=False)
    assert "--speculative-config" not in off.arguments
    assert len(off.mounts) == 1


def test_sglang_is_given_all_three_sizes_of_its_drafts() -> None:
    launch = launched(recipe("sglang", speculation=DRAFTS), draft="/d", enable_eagle3=True)
    assert value_of(launch, "--speculative-algorithm") == "EAGLE3"
    assert value_of(launch, "--speculative-draft-model-path") == "/draft"
    sizes = [
        value_of(launch, f"--speculative-{name}")
        for name in ("num-steps", "eagle-topk", "num-draft-tokens")
    ]
    assert sizes == ["3", "1", "4"]


@pytest.mark.parametrize(
    ("draft", "given", "path", "mounts"),
    [
        ("", None, "some/draft", []),
        ("/d", None, "/draft", [Mount(host="/d", inside="/draft")]),
        ("/d", "other/draft", "other/draft", []),
        ("/d", "/e", "/draft", [Mount(host="/e", inside="/draft")]),
    ],
)
def test_a_draft_model_is_a_folder_or_a_name_of_the_hub(
    draft: str, given: str | None, path: str, mounts: list[Mount]
) -> None:
    launch = launched(
        recipe(speculation=DRAFTS), draft=draft, enable_eagle3=True, eagle3_model=given
    )
    assert json.loads(value_of(launch, "--speculative-config"))["model"] == path
    assert launch.mounts[1:] == mounts


def test_without_an_image_the_draft_model_is_a_folder_of_the_host() -> None:
    launch = launched(recipe(image=None, speculation=DRAFTS), draft="/d", enable_eagle3=True)
    assert json.loads(value_of(launch, "--speculative-config"))["model"] == "/d"
    assert launch.mounts == []


def test_ik_llama_is_given_no_draft_model() -> None:
    with pytest.raises(RecipeInvalid, match="ik-llama is given no draft model"):
        launched(recipe("ik-llama", speculation=DRAFTS), draft="/d", enable_eagle3=True)


def test_variables_become_overrides_of_their_types() -> None:
    given = read_overrides(
        Overrides(),
        {
            "MODEL_PATH": "/m",
            "SERVED_MODEL_NAME": "n",
            "MAX_MODEL_LEN": "65536",
            "GPU_MEMORY_UTILIZATION": "0.90",
            "PORT": "5000",
            "ENABLE_EAGLE3": "1",
            "EAGLE3_MODEL": "some/draft",
        },
        ALL,
    )
    assert given == Overrides(
        model_path="/m",
        served_model_name="n",
        max_model_len=65536,
        gpu_memory_utilization=0.9,
        port=5000,
        enable_eagle3=True,
        eagle3_model="some/draft",
    )


@pytest.mark.parametrize(("text", "value"), [("0", False), ("false", False), ("1", True)])
def test_a_switch_is_read_as_scripts_write_it(text: str, value: bool) -> None:
    assert read_overrides(Overrides(), {"ENABLE_EAGLE3": text}, ALL).enable_eagle3 is value


def test_options_win_over_variables() -> None:
    given = read_overrides(Overrides(port=1), {"PORT": "2", "MAX_MODEL_LEN": "3"}, ALL)
    assert (given.port, given.max_model_len) == (1, 3)


def test_an_option_that_says_no_wins_too() -> None:
    given = read_overrides(Overrides(enable_eagle3=False), {"ENABLE_EAGLE3": "1"}, ALL)
    assert given.enable_eagle3 is False


def test_only_the_variables_that_a_recipe_lists_are_heard() -> None:
    environ = {"PORT": "2", "MODEL_PATH": "", "MAX_MODEL_LEN": "3", "HOME": "/root"}
    assert read_overrides(Overrides(), environ, ["PORT", "MODEL_PATH"]) == Overrides(port=2)
    assert read_overrides(Overrides(), environ, []) == Overrides()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "http"),
        ("PORT", "0"),
        ("PORT", "65536"),
        ("MAX_MODEL_LEN", "64k"),
        ("MAX_MODEL_LEN", "-1"),
        ("GPU_MEMORY_UTILIZATION", "90"),
        ("GPU_MEMORY_UTILIZATION", "0"),
        ("GPU_MEMORY_UTILIZATION", "nan"),
        ("ENABLE_EAGLE3", "perhaps"),
        ("SERVED_MODEL_NAME", "two words"),
        ("MODEL_PATH", "/a\nb"),
        ("EAGLE3_MODEL", "\x00"),
    ],
)
def test_a_bad_value_is_told_with_its_variable(name: str, value: str) -> None:
    with pytest.raises(RecipeInvalid, match=f"^{name}: ") as refused:
        read_overrides(Overrides(), {name: value}, ALL)
    assert name in str(refused.value.hint)
