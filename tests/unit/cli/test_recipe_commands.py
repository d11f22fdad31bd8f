from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.core.model import sha256_of
from pipeline.core.yaml_file import read_yaml
from pipeline.images.engine.parser_flags import ParserFlags, flags_folder, write_parser_flags
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.recipe.tiny import tiny_gguf
from pipeline.weights.model import (
    FilePin,
    WeightsSpec,
    lock_path,
    sealed_weights_lock,
    spec_path,
    write_weights_lock,
)
from tests.unit.support import ROOT, Command, build_tiny

DIGEST = "sha256:" + "0123456789abcdef" * 4
COMMIT = "c" * 40
REGISTRY = f"registry.example/engines/tiny@{DIGEST}"
BODY: dict[str, Any] = {
    "name": "small-2x",
    "summary": "A small model on two cards",
    "backing": "stated",
    "sources": {"guide": {"kind": "document", "title": "A guide"}},
    "engine": "vllm",
    "image": "tiny",
    "model": {"repository": "example/small", "name": "small"},
    "hardware": {"cards": 2, "card": "rtx-pro-6000"},
    "port": 8000,
    "flags": {"guide": {"tensor_parallel_size": 2, "max_model_len": 4096}},
    "overrides": ["MAX_MODEL_LEN", "PORT"],
}


@pytest.fixture
def recipes(checkout: Checkout) -> Path:
    """The checkout's recipes: `small-2x`, and one without an image."""
    folder = checkout.root / "recipes"
    folder.mkdir()
    write(folder, BODY)
    write(folder, {"name": "small-local", "extends": "small-2x", "image": None})
    shipped = read_yaml(flags_folder(Checkout(ROOT)) / "vllm.yaml", ParserFlags)
    for image in ("tiny", "vllm"):
        write_parser_flags(flags_folder(checkout), shipped.model_copy(update={"image": image}))
    return folder


def write(folder: Path, body: dict[str, Any]) -> None:
    (folder / f"{body['name']}.yaml").write_text(yaml.safe_dump(body, sort_keys=False))


def render(sm120: Command, *args: str, name: str = "small-2x") -> Any:
    return sm120("render", name, "--weights", "/data/small", *args)


def test_recipes_are_listed_with_what_they_rest_on(recipes: Path, sm120: Command) -> None:
    head, _, first, second = sm120("recipe", "list").out.splitlines()
    assert head.split() == ["name", "engine", "image", "gpus", "backing", "summary"]
    assert first.split()[:6] == ["small-2x", "vllm", "tiny", "2x", "rtx-pro-6000", "stated"]
    assert second.split()[0] == "small-local"
    assert [row["name"] for row in sm120("recipe", "list", "--json").json] == [
        "small-2x",
        "small-local",
    ]


def test_a_users_own_folder_comes_first(recipes: Path, sm120: Command, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    write(own, {**BODY, "summary": "My own"})
    asked = ("--recipes", own, "--json")
    assert sm120("recipe", "show", "small-2x", *asked).json["summary"] == "My own"
    assert len(sm120("recipe", "list", *asked).json) == 2


def test_a_recipe_is_shown_with_what_it_extends(recipes: Path, sm120: Command) -> None:
    shown = yaml.safe_load(sm120("recipe", "show", "small-local").out)
    assert shown["flags"] == BODY["flags"]
    assert "image" not in shown


def test_an_unknown_recipe_is_answered_with_those_there_are(recipes: Path, sm120: Command) -> None:
    ended = sm120("recipe", "show", "nope")
    assert ended.error == "UnknownRecipe"
    assert "small-2x, small-local" in ended.err


def test_an_image_in_a_registry_is_named_by_its_digest(recipes: Path, sm120: Command) -> None:
    tagged = REGISTRY.replace("@", ":v1@")
    out = render(sm120, "--as", "docker", "--registry", tagged).out
    assert f"  {REGISTRY} \\\n" in out
    assert "/data/small:/models:ro" in out


def test_the_background_and_a_docker_without_cdi_are_options(recipes: Path, sm120: Command) -> None:
    asked = ("--as", "docker", "--registry", REGISTRY, "--detach", "--no-cdi", "--lan")
    out = render(sm120, *asked).out
    assert out.startswith("docker run -d \\\n  --gpus all \\\n  -p 8000:8000 \\\n")


@pytest.mark.parametrize(
    ("option", "asked", "engine"),
    [
        ("--detach", ("systemd",), "systemd"),
        ("--detach", ("compose",), "compose"),
        ("--detach", ("shell",), "shell"),
        ("--no-cdi", ("podman",), "podman"),
        ("--no-cdi", ("quadlet",), "quadlet"),
        ("--no-cdi", ("kubernetes",), "kubernetes"),
        ("--no-cdi", ("systemd", "--runtime", "podman"), "podman"),
    ],
)
def test_an_option_that_a_format_cannot_have_is_refused(
    recipes: Path, sm120: Command, option: str, asked: tuple[str, ...], engine: str
) -> None:
    ended = render(sm120, "--registry", REGISTRY, option, "--as", *asked)
    assert (ended.code, ended.out) == (2, "")
    assert f"{option} is for" in ended.err
    assert f"this is {engine}." in ended.err


def test_an_image_that_was_built_here_has_the_name_that_load_gives_it(
    recipes: Path, sm120: Command
) -> None:
    assert build_tiny(sm120, "--accept").code == 0
    digest = yaml.safe_load((sm120.cwd / "lockfiles/golden.yaml").read_text())["images"][
        "tiny.amd64"
    ]["digest"]
    want = f"  sm120/tiny:{digest[7:19]} \\\n"
    assert want in render(sm120, "--as", "docker").out
    # the committed digest counts where nothing is built
    there = sm120("--store", sm120.cwd / "empty", "render", "small-2x", "--as", "docker",
                  "--weights", "/data/small")  # fmt: skip
    assert want in there.out


def test_an_image_without_a_digest_is_no_image_to_run(recipes: Path, sm120: Command) -> None:
    ended = render(sm120, "--as", "docker")
    assert ended.error == "UnknownImage"
    assert "sm120 build tiny" in ended.err


def test_a_digest_of_other_inputs_is_not_used(recipes: Path, sm120: Command) -> None:
    assert build_tiny(sm120, "--accept").code == 0
    path = sm120.cwd / "lockfiles/golden.yaml"
    golden = yaml.safe_load(path.read_text())
    golden["images"]["tiny.amd64"]["inputs"]["format"] = 0
    path.write_text(yaml.safe_dump(golden))
    ended = sm120("--store", sm120.cwd / "empty", "render", "small-2x", "--as", "docker",
                  "--weights", "/data/small")  # fmt: skip
    assert ended.error == "UnknownImage"


def test_options_and_variables_take_the_place_of_fields(
    recipes: Path, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_MODEL_LEN", "8192")
    monkeypatch.setenv("PORT", "9000")
    # not among what the recipe listens to
    monkeypatch.setenv("SERVED_MODEL_NAME", "other")
    asked = ("--as", "docker", "--registry", REGISTRY, "--port", "9001", "--json")
    launch = render(sm120, *asked).json
    words = launch["arguments"]
    assert words[words.index("--max-model-len") + 1] == "8192"
    assert words[words.index("--port") + 1] == "9001"
    assert (launch["port"], launch["model"], launch["digest"]) == (9001, "small", DIGEST)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        (["--gpus", "0"], "RecipeInvalid"),
        (["--eagle3"], "RecipeInvalid"),
        (["--registry", "no-registry"], "ReferenceInvalid"),
        (["--registry", "registry.example/Upper"], "ReferenceInvalid"),
    ],
)
def test_what_cannot_be_is_refused(
    recipes: Path, sm120: Command, option: list[str], error: str
) -> None:
    asked = () if "--registry" in option else ("--registry", REGISTRY)
    ended = render(sm120, "--as", "docker", *asked, *option)
    assert ended.error == error
    assert ended.out == ""


@pytest.mark.parametrize("gpus", ["a", "0,1,", "0,0", "0,64", "-1", "²,1", ""])
def test_numbers_of_gpus_are_refused_alike_by_render_and_serve(
    recipes: Path, sm120: Command, gpus: str
) -> None:
    words = (f"--gpus={gpus}", "--recipes", recipes)
    for verb in (("render", "small-2x", "--as", "docker"), ("serve", "small-2x")):
        ended = sm120(*verb, *words)
        assert (ended.code, "--gpus" in ended.err, ended.out) == (2, True, "")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--max-model-length", "4"], "is no flag of vLLM 0.32.0"),
        (["--kv-cache-dtype", "fp9"], "fp9"),
        (["--enable-auto-tool-choice"], "--tool-call-parser"),
    ],
)
def test_what_the_engine_would_refuse_stops_here(
    recipes: Path, sm120: Command, extra: list[str], message: str
) -> None:
    flags = {**BODY["flags"]["guide"], "extra": extra}
    write(recipes, {**BODY, "flags": {"guide": flags}})
    ended = render(sm120, "--as", "docker", "--registry", REGISTRY)
    assert (ended.error, ended.code) == ("RecipeInvalid", 10)
    assert message in ended.err


def test_a_model_of_the_hub_is_the_engines_to_fetch(recipes: Path, sm120: Command) -> None:
    asked = ("render", "small-2x", "--as", "docker", "--registry", REGISTRY, "--json")
    launch = sm120(*asked, "--model-path", "example/other").json
    assert (launch["mounts"], launch["arguments"][0]) == ([], "example/other")
    launch = sm120(*asked, "--model-path", "/data/other").json
    assert (launch["mounts"][0]["host"], launch["arguments"][0]) == ("/data/other", "/models")


def test_the_tiny_model_is_made_where_the_rendered_command_looks_for_it(
    recipes: Path, sm120: Command
) -> None:
    shutil.copy(ROOT / "recipes" / "tiny-cpu.yaml", recipes)
    flags = recipes.parent / "lockfiles" / "flags"
    shutil.copy(ROOT / "lockfiles" / "flags" / "llama-cpp.yaml", flags)
    launch = sm120("render", "tiny-cpu", "--as", "shell", "--json").json
    script = sm120("render", "tiny-cpu", "--as", "shell").out
    file = Path(launch["arguments"][launch["arguments"].index("-m") + 1])
    assert sha256_of(file.read_bytes()) == sha256_of(tiny_gguf())
    assert str(file) in script


@pytest.mark.parametrize("verb", [("render", "--as", "docker"), ("serve",)])
@pytest.mark.parametrize("port", ["80800", "0", "-1", "http"])
def test_a_port_that_is_none_is_a_usage_error_of_its_option(
    recipes: Path, sm120: Command, verb: tuple[str, ...], port: str
) -> None:
    ended = sm120(verb[0], "small-2x", *verb[1:], "--port", port)
    assert ended.code == 2
    assert "'--port'" in ended.err


def test_weights_that_nobody_named_are_asked_for(recipes: Path, sm120: Command) -> None:
    ended = sm120("render", "small-2x", "--as", "docker", "--registry", REGISTRY)
    assert ended.error == "RecipeInvalid"
    assert "--weights DIR" in ended.err


def test_the_shell_needs_no_image_and_sees_the_hosts_folders(recipes: Path, sm120: Command) -> None:
    for name in ("small-2x", "small-local"):
        script = render(sm120, "--as", "shell", name=name).out
        assert "exec vllm serve \\\n  /data/small \\\n" in script


def test_a_relative_folder_is_that_of_this_machine(recipes: Path, sm120: Command) -> None:
    asked = ("render", "small-2x", "--as", "docker", "--registry", REGISTRY, "--json")
    mount = sm120(*asked, "--weights", "here").json["mounts"][0]
    assert mount["host"] == f"{sm120.cwd}/here"
    # Kubernetes refuses a path with `..` in it, and systemd passes over it
    mount = sm120(*asked, "--weights", "there/../here").json["mounts"][0]
    assert mount["host"] == f"{sm120.cwd}/here"


def test_a_recipe_without_an_image_is_no_container(recipes: Path, sm120: Command) -> None:
    ended = render(sm120, "--as", "podman", "--registry", REGISTRY, name="small-local")
    assert ended.error == "RecipeInvalid"
    assert "--as shell" in ended.err


def test_clients_need_neither_image_nor_weights(recipes: Path, sm120: Command) -> None:
    asked = ("render", "small-2x", "--as", "env", "--node", "10.0.0.7")
    assert "export OPENAI_BASE_URL=http://10.0.0.7:8000/v1\n" in sm120(*asked).out
    assert sm120(*asked, "--json").json["ANTHROPIC_MODEL"] == "small"


def test_a_file_gets_what_would_be_printed(recipes: Path, sm120: Command, tmp_path: Path) -> None:
    asked = ("--as", "compose", "--registry", REGISTRY)
    printed = render(sm120, *asked).out
    ended = render(sm120, *asked, "--output", "compose.yaml")
    assert ended.out == ""
    assert (sm120.cwd / "compose.yaml").read_text() == printed


def test_a_snapshot_in_the_hubs_cache_is_mounted_with_its_repository(
    recipes: Path, sm120: Command
) -> None:
    cache = "/c/models--example--small"
    asked = ("render", "small-2x", "--as", "docker", "--registry", REGISTRY)
    out = sm120(*asked, "--weights", f"{cache}/snapshots/{COMMIT}").out
    assert f"-v {cache}:/models:ro \\\n" in out
    assert f"  /models/snapshots/{COMMIT} \\\n" in out


def test_locked_weights_are_found_in_the_hubs_cache(
    recipes: Path, checkout: Checkout, sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(recipes, {**BODY, "model": {**BODY["model"], "weights": "small"}})
    lock_weights(checkout)
    cache = sm120.cwd / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    asked = ("render", "small-2x", "--as", "docker", "--registry", REGISTRY, "--json")
    assert sm120(*asked).error == "RecipeInvalid"
    (cache / "models--example--small" / "snapshots" / COMMIT).mkdir(parents=True)
    launch = sm120(*asked).json
    assert launch["mounts"][0]["host"] == f"{cache}/models--example--small"
    assert launch["arguments"][0] == f"/models/snapshots/{COMMIT}"


SPLIT: dict[str, Any] = {
    "name": "split-2x",
    "extends": "small-2x",
    "engine": "ik-llama",
    "image": "tiny",
    "model": {"repository": "example/small", "weights": "small", "folder": "Q4_X", "name": "small"},
    "flags": {"guide": {"ctx_size": 4096, "tensor_parallel_size": None, "max_model_len": None}},
    "overrides": ["PORT"],
}


def render_split(recipes: Path, sm120: Command) -> Any:
    write(recipes, SPLIT)
    shipped = read_yaml(flags_folder(Checkout(ROOT)) / "ik-llama.yaml", ParserFlags)
    checkout = Checkout(recipes.parent)
    write_parser_flags(flags_folder(checkout), shipped.model_copy(update={"image": "tiny"}))
    asked = ("--as", "docker", "--registry", REGISTRY, "--weights", "/on/another/host")
    return sm120("render", "split-2x", *asked)


def test_the_first_part_of_weights_on_another_host_is_read_from_their_lock(
    recipes: Path, sm120: Command, checkout: Checkout
) -> None:
    names = [f"Q4_X/small-{n:05}-of-00002.gguf" for n in (1, 2)]
    lock_weights(checkout, *names, "IQ3_K/small-00001-of-00009.gguf", "README.md")
    out = render_split(recipes, sm120).out
    assert "  -v /on/another/host:/models:ro \\\n" in out
    assert "  -m /models/Q4_X/small-00001-of-00002.gguf \\\n" in out


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["Q4_X/small-00002-of-00002.gguf"],
        ["IQ3_K/small-00001-of-00002.gguf"],
        ["Q4_X/a-00001-of-00002.gguf", "Q4_X/b-00001-of-00002.gguf"],
    ],
)
def test_a_lock_that_names_no_one_first_part_does_not_help(
    recipes: Path, sm120: Command, checkout: Checkout, names: list[str]
) -> None:
    if names:
        lock_weights(checkout, *names)
    ended = render_split(recipes, sm120)
    assert (ended.error, ended.out) == ("RecipeInvalid", "")
    assert "0 files of /on/another/host/Q4_X are a first part" in ended.err
    assert "sm120 weights lock small" in ended.err


def lock_weights(checkout: Checkout, *names: str) -> None:
    """A locked set `small`."""
    about = {"name": "small", "repository": "example/small", "about": "Weights that tests know."}
    spec = WeightsSpec.model_validate({**about, "format": "safetensors", "quant": "bf16"})
    path = spec_path(checkout, "small")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_defaults=True)))
    pins = [
        FilePin(path=name, size_bytes=1, sha256="a" * 64) for name in names or ["model.safetensors"]
    ]
    write_weights_lock(lock_path(checkout, "small"), sealed_weights_lock(spec, COMMIT, pins))


def test_a_recipe_that_needs_patches_is_refused_outside_of_its_image(
    recipes: Path, sm120: Command
) -> None:
    write(recipes, {**BODY, "needs_patches": ["0001-blocks.patch"]})
    ended = render(sm120, "--as", "shell")
    assert (ended.code, ended.out) == (10, "")
    assert "lacks 0001-blocks.patch of the image tiny, and dies with these flags" in ended.err
    # every container is of that image
    assert render(sm120, "--as", "docker", "--registry", REGISTRY).code == 0


def test_patches_without_an_image_are_refused(recipes: Path, sm120: Command) -> None:
    write(recipes, {**BODY, "image": None, "needs_patches": ["0001-blocks.patch"]})
    assert "are patches of its `image`, and it names none" in render(sm120, "--as", "shell").err


def test_a_report_against_a_recipe_is_named_beside_its_command(
    recipes: Path, sm120: Command
) -> None:
    report = {"link": "https://github.com/a/b/issues/1", "what": "It drifts."}
    write(recipes, {**BODY, "contrary": [report]})
    ended = render(sm120, "--as", "docker", "--registry", REGISTRY)
    assert "small-2x: a report speaks against it: It drifts." in ended.err
    assert "drifts" not in ended.out
    assert sm120("recipe", "show", "small-2x", "--json").json["contrary"] == [report]
    for wrong in ({"what": "No link."}, {**report, "link": "issues/1"}):
        write(recipes, {**BODY, "contrary": [wrong]})
        assert "contrary" in render(sm120, "--as", "docker").err


def test_who_extends_a_proved_recipe_has_proved_nothing(recipes: Path, sm120: Command) -> None:
    write(recipes, {**BODY, "backing": "proved"})
    write(recipes, {"extends": "small-2x", "name": "mine", "port": 9000})
    rows = {row["name"]: row["backing"] for row in sm120("recipe", "list", "--json").json}
    assert (rows["small-2x"], rows["mine"]) == ("proved", "unproved")
    write(recipes, {"extends": "small-2x", "name": "mine", "backing": "proved"})
    assert sm120("recipe", "show", "mine", "--json").json["backing"] == "proved"


HOSTS = ("--hosts", "10.0.0.1,10.0.0.2", "--registry", REGISTRY)


def test_each_rank_is_printed_or_one_alone(recipes: Path, sm120: Command) -> None:
    both = render(sm120, "--as", "docker", *HOSTS).out
    assert both.count("docker run") == 2
    assert "# rank 0 of 2\n" in both
    assert "--node-rank 1" in both
    second = render(sm120, "--as", "docker", *HOSTS, "--node-rank", "1").out
    assert second.startswith("docker run")
    assert second.strip() in both


def test_each_rank_gets_a_file_of_its_own(recipes: Path, sm120: Command, tmp_path: Path) -> None:
    render(sm120, "--as", "systemd", *HOSTS, "--output", str(tmp_path / "small.service"))
    texts = [(tmp_path / f"small-rank-{rank}.service").read_text() for rank in (0, 1)]
    assert ["--headless" in text for text in texts] == [False, True]


def test_the_ranks_of_a_recipe_are_a_list_for_programs(recipes: Path, sm120: Command) -> None:
    shown = render(sm120, "--as", "docker", *HOSTS, "--json").json
    assert [(each["nodes"], each.get("rank", 0)) for each in shown] == [(2, 0), (2, 1)]
    assert "nodes" not in render(sm120, "--as", "docker", "--registry", REGISTRY, "--json").json


def test_a_slurm_job_needs_no_addresses(recipes: Path, sm120: Command) -> None:
    out = render(sm120, "--as", "slurm", "--nodes", "2", "--registry", REGISTRY).out
    assert "#SBATCH --nodes=2\n" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--as", "docker", "--nodes", "2"], 10, "is for 2 nodes, and 0 are named"),
        (["--as", "docker", "--nodes", "3"], 10, "its 2 cards are not on 3 equal nodes"),
        (["--as", "docker", "--node-rank", "0"], 10, "it has no ranks"),
        (["--as", "docker", *HOSTS[:2], "--node-rank", "2"], 10, "its ranks are 0 to 1"),
        (["--as", "kubernetes", "--nodes", "2"], 10, "must start and end together"),
        (["--as", "slurm", *HOSTS[:2]], 2, "Slurm chooses the nodes"),
        (["--as", "slurm", "--runtime", "docker"], 2, "--runtime docker is not for slurm"),
        (["--as", "docker", "--runtime", "podman"], 2, "--runtime podman is not for docker"),
        (["--as", "shell", "--rdma"], 2, "--rdma is for a container"),
    ],
)
def test_what_nodes_cannot_have_is_refused(
    recipes: Path, sm120: Command, words: list[str], code: int, message: str
) -> None:
    ended = render(sm120, *words, "--registry", REGISTRY)
    assert (ended.code, ended.out) == (code, "")
    assert message in ended.err
