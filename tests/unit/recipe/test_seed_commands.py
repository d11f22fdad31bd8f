"""Recipes against the documents that they come from: equal, or told in `changes`.

The commands are quoted from, in this order: "Blackwell Shenanigans 001: Kimi K2.6, Tiny Box, Real
Victory"; README and logs of magik6k/glm-kimi-sm120-rtx6000bw ("Kimi K2 on SM120"); "How to deploy
Kimi K2.6 on Lambda"; "Running Kimi-K2.6 Locally: Making a 1T MoE Practical with ik_llama.cpp and
Blackwell".
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.serving.fit.facts import fact_of
from pipeline.serving.fit.parts import tensor_parts
from pipeline.serving.recipe.container import LaunchTarget
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.launch import (
    Launch,
    Overrides,
    plan_launch,
    read_overrides,
    with_whole_repositories,
)
from pipeline.serving.recipe.model import CommandChange, Recipe
from pipeline.serving.recipe.render.formats import render_launch
from pipeline.serving.report.build import all_references
from tests.unit.recipe.commands import (
    launch_parts,
    logged_parts,
    parts,
    rendered_parts,
    unexplained,
)
from tests.unit.recipe.render.launches import DIGEST
from tests.unit.support import ROOT

RECIPES = Recipes([ROOT / "recipes"])


def launched(recipe: Recipe, overrides: Overrides | None = None, weights: str = "/w") -> Launch:
    return plan_launch(recipe, overrides or Overrides(), weights=weights, draft="/draft-weights")


# "Recommended Starting Command"
BLOG_CONTAINER = """
MODEL_PATH=moonshotai/Kimi-K2.6 \\
SERVED_MODEL_NAME=Kimi-K2.6 \\
MAX_MODEL_LEN=65536 \\
GPU_MEMORY_UTILIZATION=0.90 \\
PORT=5000 \\
./scripts/serve-kimi-k26-community-docker.sh
"""
# "That path bakes in the stack that mattered most for this shape"
BLOG_BAKED_IN = ["TRITON_MLA", "fp8 KV cache", "DCP", "patched NCCL behavior"]
# "If you prefer the local vLLM path instead of the container"
BLOG_LOCAL = """
MODEL_PATH=moonshotai/Kimi-K2.6 \\
SERVED_MODEL_NAME=Kimi-K2.6 \\
MAX_MODEL_LEN=65536 \\
GPU_MEMORY_UTILIZATION=0.92 \\
PORT=8000 \\
./scripts/serve-kimi-k26-vllm.sh
"""
# "When To Reach For SGLang"
BLOG_SGLANG = "./scripts/serve-kimi-k26-sglang.sh"
# "EAGLE3: Later, Not First"
BLOG_EAGLE3 = """
ENABLE_EAGLE3=1 \\
EAGLE3_MODEL=lightseekorg/kimi-k2.6-eagle3 \\
./scripts/serve-kimi-k26-community-docker.sh
"""
# The published part of the scripts: what each variable becomes.
VARIABLES = {
    "MODEL_PATH": "{}",
    "SERVED_MODEL_NAME": "--served-model-name {}",
    "MAX_MODEL_LEN": "--max-model-len {}",
    "GPU_MEMORY_UTILIZATION": "--gpu-memory-utilization {}",
    "PORT": "--port {}",
}
BLOG_VLLM = ["kimi-k26-vllm-8x", "kimi-k26-vllm-local"]


def variables(quote: str) -> dict[str, str]:
    words = [word for word in parts(quote) if "=" in word]
    return dict(word.split("=", 1) for word in words)


def script(quote: str) -> str:
    return parts(quote)[-1]


def blog_command(quote: str, *baked_in: str) -> list[str]:
    flags = [VARIABLES[name].format(value) for name, value in variables(quote).items()]
    return [*parts(" ".join([*flags, *baked_in])), script(quote)]


def blog_launch(name: str, quote: str) -> tuple[Recipe, Launch]:
    recipe = RECIPES.read(name)
    wanted = read_overrides(Overrides(), variables(quote), recipe.overrides)
    return recipe, launched(recipe, wanted)


def test_the_blog_s_first_command_is_the_recipe_for_eight_cards() -> None:
    recipe, launch = blog_launch("kimi-k26-vllm-8x", BLOG_CONTAINER)
    document = blog_command(
        BLOG_CONTAINER, "--attention-backend TRITON_MLA", "--kv-cache-dtype fp8"
    )
    assert unexplained(recipe, document, launch_parts(launch, program=True)) == []


def test_what_the_blog_s_image_bakes_in_is_there() -> None:
    recipe = RECIPES.read("kimi-k26-vllm-8x-zen5")
    words = launched(recipe).arguments
    found = {
        "TRITON_MLA": words[words.index("--attention-backend") + 1] == "TRITON_MLA",
        "fp8 KV cache": words[words.index("--kv-cache-dtype") + 1] == "fp8",
        "DCP": int(words[words.index("--decode-context-parallel-size") + 1]) > 1,
        "patched NCCL behavior": recipe.image == "vllm-nccl"
        and recipe.hardware.processor == "amd-zen-5",
    }
    assert found == dict.fromkeys(BLOG_BAKED_IN, True)


def test_the_blog_s_local_command_is_the_recipe_without_a_container() -> None:
    recipe, launch = blog_launch("kimi-k26-vllm-local", BLOG_LOCAL)
    ours = launch_parts(launch, program=True)
    assert unexplained(recipe, blog_command(BLOG_LOCAL), ours) == []
    assert (launch.image, launch.mounts) == (None, [])


@pytest.mark.parametrize(
    ("name", "quote"),
    [("kimi-k26-vllm-8x", BLOG_CONTAINER), ("kimi-k26-vllm-local", BLOG_LOCAL)],
)
def test_without_variables_the_recipes_are_the_blog_s_commands_too(name: str, quote: str) -> None:
    recipe, asked = blog_launch(name, quote)
    plain = launched(recipe)
    folder = "/models" if recipe.image else "/w"
    assert plain.arguments == [folder, *asked.arguments[1:]]
    assert (plain.port, plain.model) == (asked.port, asked.model)


def test_the_blog_s_next_move_is_sglang_with_its_first_context() -> None:
    recipe = RECIPES.read("kimi-k26-sglang-8x")
    # "keep the initial context target around 65536"
    # the variables of the skill's script
    more = "OMP_NUM_THREADS=8 FLASHINFER_USE_CUDA_NORM=1 HF_HUB_OFFLINE=1"
    document = [*parts(f"{more} --context-length 65536"), script(BLOG_SGLANG)]
    assert unexplained(recipe, document, launch_parts(launched(recipe), program=True)) == []
    assert {RECIPES.read(name).fallback for name in BLOG_VLLM} == {recipe.name}


@pytest.mark.parametrize("name", [*BLOG_VLLM, "kimi-k26-sglang-8x"])
def test_the_blog_s_draft_model_is_there_and_off(name: str) -> None:
    assert "speculative" not in " ".join(launched(RECIPES.read(name)).arguments)
    _, launch = blog_launch(name, BLOG_EAGLE3)
    given = " ".join(launch.arguments).partition("--speculative")[2]
    assert variables(BLOG_EAGLE3)["EAGLE3_MODEL"] in given


@pytest.mark.parametrize("name", [*BLOG_VLLM, "kimi-k26-sglang-8x"])
def test_every_variable_of_the_blog_can_be_set(name: str) -> None:
    asked = variables(BLOG_CONTAINER) | variables(BLOG_EAGLE3)
    assert set(RECIPES.read(name).overrides) == set(asked)


def test_the_blog_s_ladder_of_contexts_is_walked() -> None:
    # "Walk context up through 98304, 131072, and only then consider 262144."
    contexts = RECIPES.read("kimi-k26-vllm-8x").smoke.contexts
    assert contexts == [65536, 98304, 131072, 262144]


# README, "Working Launch Command"
README = """
python3 -m sglang.launch_server \\
    --model-path moonshotai/Kimi-K2-Instruct \\
    --quantization nvfp4 \\
    --tp 8 \\
    --trust-remote-code \\
    --host 0.0.0.0 \\
    --port 30000
"""
# logs/sglang-k2-thinking-final-bench.log, those of its arguments that a recipe can set
LOG_K2_THINKING = """
ServerArgs(model_path='nvidia/Kimi-K2-Thinking-NVFP4', trust_remote_code=True, context_length=None,
host='127.0.0.1', port=30000, quantization='modelopt_fp4', kv_cache_dtype='auto',
mem_fraction_static=0.848, max_running_requests=None, chunked_prefill_size=8192, tp_size=8,
served_model_name='nvidia/Kimi-K2-Thinking-NVFP4', reasoning_parser=None, tool_call_parser=None,
attention_backend='triton', speculative_algorithm=None, moe_runner_backend='auto',
disable_radix_cache=False, disable_cuda_graph=True, disable_custom_all_reduce=False,
disable_shared_experts_fusion=False, enable_deterministic_inference=False)
"""
# logs/sglang-k25-int4-sm120fix.log, the same of them
LOG_K25 = """
ServerArgs(model_path='/workspace/models/Kimi-K2.5', trust_remote_code=True, context_length=None,
host='127.0.0.1', port=30000, quantization=None, kv_cache_dtype='auto',
mem_fraction_static=0.7714564062499999, max_running_requests=None, chunked_prefill_size=8192,
tp_size=8, served_model_name='/workspace/models/Kimi-K2.5', reasoning_parser='kimi_k2',
tool_call_parser='kimi_k2', attention_backend='triton', speculative_algorithm=None,
moe_runner_backend='auto', disable_radix_cache=False, disable_cuda_graph=True,
disable_custom_all_reduce=False, disable_shared_experts_fusion=False,
enable_deterministic_inference=False)
"""


def test_the_readme_s_command_is_the_recipe_for_k2_instruct() -> None:
    recipe = RECIPES.read("kimi-k2-instruct-sglang-8x")
    ours = launch_parts(launched(recipe), program=True)
    assert unexplained(recipe, parts(README), ours) == []


@pytest.mark.parametrize(
    ("name", "log"),
    [
        ("kimi-k2-thinking-nvfp4-sglang-8x", LOG_K2_THINKING),
        ("kimi-k25-int4-sglang-8x", LOG_K25),
    ],
)
def test_a_logged_run_is_its_recipe(name: str, log: str) -> None:
    recipe = RECIPES.read(name)
    ours = launch_parts(launched(recipe), program=False)
    assert unexplained(recipe, logged_parts(log), ours) == []


def test_the_report_s_two_models_have_recipes_that_leave_memory_as_it_was() -> None:
    # report: 180,191 tokens of KV cache for K2-Thinking, 4,578 for K2.5
    fractions = {
        name: RECIPES.read(name).flags["log"].given()["mem_fraction_static"]
        for name in ("kimi-k2-thinking-nvfp4-sglang-8x", "kimi-k25-int4-sglang-8x")
    }
    assert list(fractions.values()) == [0.848, 0.771]
    assert "misconfiguration" in str(RECIPES.read("kimi-k25-int4-sglang-8x").sources["log"].why)


# "Start the vLLM server"
LAMBDA = """
docker run -d --gpus all \\
  --ipc=host \\
  -p 8001:8001 \\
  -v ~/.cache/huggingface:/root/.cache/huggingface \\
  -e VLLM_USE_V1=1 \\
  --entrypoint bash \\
  vllm/vllm-openai:cu130-nightly \\
  -c "pip install -q 'transformers==4.57.6' && exec python3 -m vllm.entrypoints.openai.api_server \\
      --model moonshotai/Kimi-K2.6 \\
      --served-model-name kimi-k2.6 \\
      --host 0.0.0.0 \\
      --port 8001 \\
      --tensor-parallel-size 8 \\
      --mm-encoder-tp-mode data \\
      --compilation_config.pass_config.fuse_allreduce_rms true \\
      --tool-call-parser kimi_k2 \\
      --reasoning-parser kimi_k2 \\
      --enable-auto-tool-choice \\
      --trust-remote-code \\
      --kv-cache-dtype fp8 \\
      --no-enable-prefix-caching \\
      --speculative-config '{\\"method\\":\\"eagle3\\",\\"model\\":\\"lightseekorg/kimi-k2.6-eagle3\\",\\"num_speculative_tokens\\":3}'"
"""  # noqa: E501


def lambda_parts() -> list[str]:
    outer, _, _ = LAMBDA.replace("\\\n", " ").partition(" -c ")
    install, _, serve = shlex.split(LAMBDA.replace("\\\n", " "))[-1].partition(" && exec ")
    return [*parts(outer.replace("docker run", "")), *parts(install), *parts(serve)]


def lambda_launch() -> tuple[Recipe, Launch]:
    """With the weights where the guide has them: in the Hub's cache of the user."""
    recipe, cache = RECIPES.read("kimi-k26-vllm-b200"), "/home/you/.cache/huggingface/hub"
    launch = plan_launch(
        recipe,
        Overrides(),
        weights=f"{cache}/models--moonshotai--Kimi-K2.6/snapshots/1",
        draft=f"{cache}/models--lightseekorg--kimi-k2.6-eagle3/snapshots/2",
    )
    return recipe, launch


def test_every_word_of_lambda_s_command_is_printed_or_named_with_its_reason() -> None:
    recipe, launch = lambda_launch()
    target = LaunchTarget(image="sm120/vllm:1")
    text = render_launch(launch, target, "docker")
    ours = rendered_parts(text, launch, target.image, program=True)
    assert unexplained(recipe, lambda_parts(), ours) == []
    # a word that is dropped or added is seen, whichever it is
    for part in ours:
        assert unexplained(recipe, lambda_parts(), [each for each in ours if each != part])
    for part in lambda_parts():
        rest = [each for each in lambda_parts() if each != part]
        assert unexplained(recipe, rest, ours), part


def test_options_print_what_lambda_s_command_has() -> None:
    _, launch = lambda_launch()
    as_asked = LaunchTarget(image="sm120/vllm:1", detached=True, cdi=False, lan=True)
    text = render_launch(with_whole_repositories(launch), as_asked, "docker")
    ours = rendered_parts(text, launch, as_asked.image, program=True)
    outer = ["-d", "--gpus all", "--ipc=host", "-p 8001:8001"]
    assert set(outer) <= set(lambda_parts())
    assert set(outer) <= set(ours)
    # the files of both snapshots are links to blobs, which the container sees, too
    cache = "/home/you/.cache/huggingface/hub"
    assert f"-v {cache}/models--moonshotai--Kimi-K2.6:/models:ro " in text
    assert f"-v {cache}/models--lightseekorg--kimi-k2.6-eagle3:/draft:ro " in text
    assert " /models/snapshots/1 " in text
    assert '"model":"/draft/snapshots/2"' in text


def test_what_lambda_s_command_sets_is_what_the_pinned_vllm_is() -> None:
    flags, lock = (
        yaml.safe_load((ROOT / "lockfiles" / name).read_text())
        for name in ("flags/vllm.yaml", "images/vllm.amd64.lock.yaml")
    )
    # -e VLLM_USE_V1=1: nothing chooses another engine any more
    assert not {"VLLM_USE_V0", "VLLM_USE_V1"} & set(flags["variables"])
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" in flags["variables"]
    # pip install transformers==4.57.6: a newer one is installed
    assert "transformers==4.57.6" in LAMBDA
    versions = {wheel["name"]: wheel["version"] for wheel in lock["wheels"]}
    assert versions["vllm"] == "0.32.0"
    assert tuple(map(int, versions["transformers"].split("."))) >= (5, 16)
    # --model moonshotai/Kimi-K2.6: as a plain word, of which it takes one
    assert flags["plain_words"] == 1
    assert lambda_launch()[1].arguments[0] == "/models"


# "The Launch Command I Ended Up Keeping"
ARTICLE = r"""
podman run --rm \
--device nvidia.com/gpu=all \
-p 8000:8000 \
--cap-add=SYS_NICE \
-v /mnt/data/models/models--ubergarm--Kimi-K2.6-GGUF:/models:ro,Z \
registry.home.arpa/ik_llama.cpp:latest \
-m /models/snapshots/${REF}/IQ3_K/Kimi-K2.6-IQ3_K-00001-of-00012.gguf \
--ctx-size 131768 \
--parallel 1 \
--threads 15 \
--threads-batch 32 \
-b 8192 \
-ub 4096 \
-ngl 999 \
-mla 3 \
-ger \
--special \
-amb 512 \
--jinja \
--host 0.0.0.0 \
--port 8000 \
--warmup-batch \
--alias kimi-k2.6-IQ3_K \
-ot "blk\.(1|2)\.ffn.*=CUDA0" \
-ot "blk\.(59|60)\.ffn.*=CUDA1" \
-ot "exps=CPU" \
--temp 0.6 \
--chat-template-kwargs '{"thinking":false}'
"""
# "Benchmark Results": configuration, experts on GPU; the layouts that the recipes derive from it
ARTICLE_LAYOUTS = {
    "kimi-k26-ik-llama-2x": [{1, 2}, {59, 60}],
    "kimi-k26-ik-llama-2x-q4-x": [{1, 2}, {59, 60}],
    "kimi-k26-ik-llama-2x-6-layers": [{1, 2, 3}, {58, 59, 60}],  # "6 layers (3+3)"
    "kimi-k26-ik-llama-2x-10-layers": [set(range(1, 9)), {59, 60}],  # "10 layers (8+2)"
    "kimi-k26-ik-llama-2x-cpu-moe": [],  # "Baseline (--cpu-moe)", "0 layers"
    "kimi-k26-llama-cpp-2x": [{1, 2}, {59, 60}],
}


def article_launch(recipe: Recipe, folder: Path) -> Launch:
    """The article does not say how many parts Q4_X has, so the file is a made-up one."""
    (folder / "Q4_X").mkdir(exist_ok=True)
    (folder / "Q4_X" / "any-00001-of-00002.gguf").touch()
    return launched(recipe, weights=str(folder))


def article_parts(launch: Launch) -> list[str]:
    image = f"registry.home.arpa/ik_llama.cpp@{DIGEST}"
    text = render_launch(launch, LaunchTarget(image=image), "podman")
    ours = rendered_parts(text, launch, image, program=False)
    return [part.replace("any-00001-of-00002", "*-00001-of-*") for part in ours]


@pytest.mark.parametrize("name", ARTICLE_LAYOUTS)
def test_the_article_s_command_is_the_recipe_or_its_changes_say_more(
    name: str, tmp_path: Path
) -> None:
    recipe = RECIPES.read(name)
    document = parts(ARTICLE.replace("podman run", ""))
    assert unexplained(recipe, document, article_parts(article_launch(recipe, tmp_path))) == []


def test_the_kept_layout_is_given_in_the_article_s_order() -> None:
    words = launched(RECIPES.read("kimi-k26-ik-llama-2x")).arguments
    quoted = shlex.split(ARTICLE.replace("\\\n", " "))
    assert patterns(words) == patterns(quoted)
    assert patterns(words)[-1] == "exps=CPU"  # the first that matches counts


@pytest.mark.parametrize("name", ARTICLE_LAYOUTS)
def test_the_article_s_layers_are_on_the_cards(name: str, tmp_path: Path) -> None:
    found = patterns(article_launch(RECIPES.read(name), tmp_path).arguments)
    on_cards = [p for p in found if "CUDA" in p]
    assert [layers(p) for p in on_cards] == ARTICLE_LAYOUTS[name]
    assert [p.rpartition("=")[2] for p in on_cards] == ["CUDA0", "CUDA1"][: len(on_cards)]


def patterns(words: list[str]) -> list[str]:
    return [words[n + 1] for n, word in enumerate(words) if word == "-ot"]


def layers(pattern: str) -> set[int]:
    numbers = pattern[pattern.index("(") + 1 : pattern.index(")")]
    return {int(number) for number in numbers.split("|")}


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("tensor_parallel_size", 4, "left out without a word: --tp 8.0"),
        ("disable_cuda_graph", True, "added without a word: --disable-cuda-graph"),
        ("quantization", "fp8", "not added: --quantization modelopt_fp4"),
    ],
)
def test_a_changed_flag_that_nobody_explains_is_found(field: str, value: Any, found: str) -> None:
    body = RECIPES.read("kimi-k2-instruct-sglang-8x").model_dump(exclude_none=True)
    for group in body["flags"].values():
        group.pop(field, None)
    body["flags"]["readme"][field] = value
    recipe = type(RECIPES.read("kimi-k2-instruct-sglang-8x")).model_validate(body)
    ours = launch_parts(launched(recipe), program=True)
    assert found in unexplained(recipe, parts(README), ours)


def test_an_explanation_of_nothing_and_one_that_is_missing_are_found() -> None:
    recipe = RECIPES.read("kimi-k2-instruct-sglang-8x")
    more = CommandChange(
        document="--context-length 4096", here="--disable-radix-cache", why="No reason."
    )
    ours = launch_parts(launched(recipe), program=True)
    with_more = recipe.model_copy(update={"changes": [*recipe.changes, more]})
    assert unexplained(with_more, parts(README), ours) == [
        "not left out, or not there: --context-length 4096.0",
        "not added: --disable-radix-cache",
    ]
    without = recipe.model_copy(update={"changes": recipe.changes[1:]})
    assert unexplained(without, parts(README), ours) == [
        "left out without a word: --quantization nvfp4",
        "added without a word: --quantization modelopt_fp4",
    ]


def test_what_the_readme_runs_first_is_the_command_of_a_document() -> None:
    text = (ROOT / "README.md").read_text().partition("\n## Serve a recipe\n")[2]
    block = text.partition("```sh\n")[2].partition("```")[0]
    told = re.search(r"sm120 serve (\S+) --weights (\S+)", block)
    assert told is not None
    recipe = RECIPES.read(told[1])
    document = next(s for s in recipe.sources.values() if s.kind == "document")
    assert recipe.backing == "stated"
    assert f"({document.link})" in text
    # the weights of this recipe, fetched to where it is given them; its port; the same name in all
    assert f"sm120 weights fetch {recipe.model.weights} --output {told[2]} " in block
    assert f"http://localhost:{recipe.port}/v1/models" in block
    assert {name for name in RECIPES.names() if f" {name} " in text} == {recipe.name}
    fact = fact_of(str(recipe.model.repository))
    assert fact is not None
    size = sum(part.file_bytes() for part in tensor_parts(fact.architecture()))
    assert f"# {size / 1e9:.0f} GB, resumable" in block


def test_every_document_behind_a_recipe_has_its_address() -> None:
    page = (ROOT / "docs" / "where-it-comes-from.md").read_text()
    sources = [s for name in RECIPES.names() for s in RECIPES.read(name).sources.values()]
    links = {s.title: s.link or "no link" for s in sources if s.kind == "document"}
    links |= {r.title: r.link or "no link" for r in all_references()}
    assert len(links) >= 5  # of the documents
    # a path in a repository may follow its name
    assert {title: link for title, link in links.items() if link.split()[0] not in page} == {}


def test_the_reader_of_commands_tells_flags_switches_and_words_apart() -> None:
    command = """docker run -d --gpus all -e A=b -v /x:/models:ro,Z image:tag -m /y --jinja \\
      --temp 0.60 --kw '{"b": 1, "a":2}' -ot "x(1|2)=CPU" """
    assert parts(command.replace("docker run", "")) == [
        "-d",
        "--gpus all",
        "A=b",
        "/models read-only",
        "image:tag",
        "-m /y",
        "--jinja",
        "--temp 0.6",
        "--kw " + json.dumps({"a": 2, "b": 1}),
        "-ot x(1|2)=CPU",
    ]
