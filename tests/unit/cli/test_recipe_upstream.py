"""`sm120 recipe diff`, `import` and `drift`: files of other projects are data, never commands."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.images.spec.checkout import find_checkout
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.recipe.launch import Overrides, plan_launch
from pipeline.serving.recipe.parser import require_known_flags
from pipeline.serving.recipe.upstream import by_flag, read_commands, words_of
from tests.unit.support import ROOT, Command, Ended

PATH = "models/Org/Model.yaml"
# the fields of vllm-project/recipes, with values of this test
VLLM: dict[str, Any] = {
    "meta": {"title": "Model", "hardware": {"b200": "verified"}},
    "model": {
        "model_id": "Org/Model",
        "base_args": ["--max-model-len", "8192"],
        "base_env": {"VLLM_LOGGING_LEVEL": "INFO"},
    },
    "features": {
        "tool_calling": {
            "args": ["--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"]
        },
        "long_context": {"args": ["--max-model-len", "65536"]},
        "spec_decoding": {
            "default_mode": "mtp",
            "modes": {
                "ngram": {"args": ["--speculative-config", '{"method":"ngram"}']},
                "mtp": {
                    "args": [
                        "--speculative-config",
                        '{"method":"mtp","num_speculative_tokens":3}',
                    ]
                },
            },
        },
    },
    "opt_in_features": ["long_context", "spec_decoding"],
    "variants": {
        "default": {"precision": "bf16"},
        "nvfp4": {
            "model_id": "Org/Model-NVFP4",
            "extra_args": ["--kv-cache-dtype", "fp8"],
            "hardware_overrides": {"rtx_5090": {"extra_args": ["--enforce-eager"]}},
        },
    },
    "hardware_overrides": {
        "blackwell": {"extra_args": ["--max-num-seqs", "64"]},
        "nvidia": {"extra_args": ["--max-num-seqs", "32"]},
    },
    "guide": (
        "Text\n```bash\nvllm serve Org/Model \\\n  --tensor-parallel-size 4 --host 0.0.0.0\n```\n"
    ),
}
# the fields of sgl-project/sgl-cookbook
COOKBOOK: dict[str, Any] = {
    "vendor": "org",
    "families": [
        {
            "name": "Model",
            "models": [
                {
                    "name": "Model",
                    "model_path": "Org/Model",
                    "attributes": {"llm": {"tool_parser": "kimi_k2"}},
                    "hardware": {
                        "B200": {
                            "configurations": [
                                {
                                    "name": "default",
                                    "engine": {
                                        "env_vars": {"SGLANG_ENABLE_PP_SPEC": "1"},
                                        "tp": 8,
                                        "dp": None,
                                        "extra_args": ["--mem-fraction-static", "0.8"],
                                    },
                                    "prefill": None,
                                    "decode": None,
                                },
                                {"name": "apart", "engine": None, "prefill": {"tp": 4}},
                            ]
                        }
                    },
                }
            ],
        }
    ],
}
# a cell of a page of the cookbook in sgl-project/sglang
PAGE = """export const config = {
  modelNames: { "default|nvfp4": "Org/Model-NVFP4" },
  cells: [
    {
      match: { hw: "rtx", variant: "default", quant: "nvfp4", nodes: "single" },
      verified: true,
      env: ["SGLANG_ENABLE_PP_SPEC=1"],
      flags: [
        "--model-path {{MODEL_NAME}}",
        "--tp 2", // two cards
        "--kv-cache-dtype fp8_e4m3",
        "--host {{HOST_IP}}",
        "--port {{PORT}}",
      ],
    },
  ],
};
"""


def _shell(command: str) -> bytes:
    return f"# Page\n\n```bash\n{command}\n```\n".encode()


def _with(part: str, **changes: object) -> bytes:
    return yaml.safe_dump({**VLLM, part: {**VLLM[part], **changes}}).encode()


def _git(repo: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(repo), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _commit(repo: Path, body: bytes, path: str = PATH) -> str:
    (repo / path).parent.mkdir(parents=True, exist_ok=True)
    (repo / path).write_bytes(body)
    _git(repo, "add", "-A")
    _git(repo, "commit", "-q", "-m", "x")
    return _git(repo, "rev-parse", "HEAD")


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A checkout of a project, as a user has it after `git clone`."""
    made = tmp_path / "upstream"
    made.mkdir()
    _git(made, "init", "-q")
    _git(made, "remote", "add", "origin", "git@example.org:project/recipes.git")
    _commit(made, yaml.safe_dump(VLLM).encode())
    return made


def _import(sm120: Command, place: str | Path, *more: str | Path) -> Ended:
    return sm120("--checkout", ROOT, "recipe", "import", place, "--name", "mine", *more)


def _file(tmp_path: Path, data: bytes, name: str = "page.md") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def test_a_variant_becomes_a_recipe_that_names_its_commit(
    sm120: Command, repo: Path, tmp_path: Path
) -> None:
    commit = _git(repo, "rev-parse", "HEAD")
    own = tmp_path / "own"
    own.mkdir()
    picked = ("--pick", "variant/nvfp4", "--cards", "2", "--output", own)
    ended = _import(sm120, f"{repo}@HEAD:{PATH}", *picked)
    assert ended.code == 0, ended.err
    recipe = Recipes([own]).read("mine")
    assert recipe.backing == "stated"
    assert recipe.model.repository == "Org/Model-NVFP4"
    link = f"https://example.org/project/recipes/blob/{commit}/{PATH}"
    assert recipe.sources["upstream"].link == link
    launch = plan_launch(recipe, Overrides(), weights="/models")
    flags = by_flag(launch.arguments)
    # of the generation's override, the variant and the features that are on
    assert flags["--max-num-seqs"] == ["64"]
    assert flags["--kv-cache-dtype"] == ["fp8"]
    assert flags["--tool-call-parser"] == ["qwen3_coder"]
    assert flags["--max-model-len"] == ["8192"]
    assert launch.environment == {"VLLM_LOGGING_LEVEL": "INFO"}
    require_known_flags(find_checkout(ROOT), launch)
    assert "--tensor-parallel-size: the document has nothing, the recipe 2" in ended.err
    # what is there is not overwritten
    again = _import(sm120, f"{repo}@HEAD:{PATH}", *picked)
    assert (again.error, "is there already" in again.err) == ("RecipeInvalid", True)


def test_features_and_hardware_are_taken_on_request_and_the_last_flag_counts(
    sm120: Command, repo: Path
) -> None:
    more = ("--feature", "long_context", "--feature", "spec_decoding", "--hardware", "rtx_5090")
    ended = _import(sm120, f"{repo}@HEAD:{PATH}", "--pick", "variant/nvfp4", *more, "--json")
    assert ended.code == 0, ended.err
    flags = ended.json["recipe"]["flags"]["upstream"]
    assert flags["max_model_len"] == 65536
    assert flags["enforce_eager"] is True
    assert flags["extra"] == [
        "--speculative-config",
        '{"method":"mtp","num_speculative_tokens":3}',
    ]


def test_a_command_of_a_guide_loses_its_address_and_that_is_said(
    sm120: Command, tmp_path: Path
) -> None:
    path = _file(tmp_path, yaml.safe_dump(VLLM).encode(), "Model.yaml")
    ended = _import(sm120, path, "--pick", "command/1", "--json")
    assert ended.json["recipe"]["hardware"] == {"cards": 4, "card": "rtx-pro-6000"}
    assert ended.json["differences"] == [{"what": "--host", "before": "0.0.0.0", "after": None}]
    # without a commit the bytes are named
    assert "sha256:" in ended.json["recipe"]["sources"]["upstream"]["title"]


def test_a_cell_of_the_cookbook_becomes_a_recipe(sm120: Command, tmp_path: Path) -> None:
    path = _file(tmp_path, yaml.safe_dump(COOKBOOK).encode(), "model.yaml")
    ended = _import(sm120, path, "--pick", "Model/B200/default", "--json")
    assert ended.code == 0, ended.err
    assert ended.json["recipe"]["flags"]["upstream"] == {
        "tensor_parallel_size": 8,
        "mem_fraction_static": 0.8,
    }
    assert ended.json["recipe"]["image"] == "sglang"


def test_a_cell_of_a_page_becomes_a_recipe(sm120: Command, tmp_path: Path) -> None:
    ended = _import(sm120, _file(tmp_path, PAGE.encode(), "model.jsx"), "--json")
    assert ended.code == 0, ended.err
    assert ended.json["recipe"]["model"]["repository"] == "Org/Model-NVFP4"
    assert ended.json["recipe"]["flags"]["upstream"] == {
        "tensor_parallel_size": 2,
        "kv_cache_dtype": "fp8_e4m3",
    }
    assert ended.json["recipe"]["environment"] == {"upstream": {"SGLANG_ENABLE_PP_SPEC": "1"}}


def test_a_page_of_markdown_with_one_command_needs_no_label(sm120: Command, tmp_path: Path) -> None:
    text = "python3 -m sglang.launch_server \\\n  --model-path Org/Model --tp 4"
    other = "\n```bash\npip install sglang\n```\n```python\nvllm serve x\n```\n"
    ended = _import(sm120, _file(tmp_path, _shell(text) + other.encode()), "--json")
    assert ended.code == 0, ended.err
    assert ended.json["recipe"]["engine"] == "sglang"


def test_all_commands_are_listed_with_what_is_refused(sm120: Command, tmp_path: Path) -> None:
    path = _file(tmp_path, _shell("vllm serve Org/A") + _shell("vllm serve $MODEL"))
    rows = _import(sm120, path, "--list", "--json").json
    assert [row["label"] for row in rows] == ["command/1", "command/2"]
    assert rows[1]["command"].startswith("refused: '$MODEL'")


SERVE = "vllm serve Org/Model"
# what stands in a file, its name, what the error says
HOSTILE: dict[str, tuple[bytes, str, str]] = {
    "a flag that no version has": (_shell(f"{SERVE} --make-it-fast"), "p.md", "is no flag of vLLM"),
    "a value that the flag does not take": (
        _shell(f"{SERVE} --max-model-len many"),
        "p.md",
        "'many' is no size",
    ),
    "a substitution": (_shell(f"{SERVE} --seed $(id)"), "p.md", "filled in by a shell"),
    "a substitution in quotes": (_shell(f'{SERVE} --seed "$(id)"'), "p.md", "filled in by a shell"),
    "backticks": (_shell(f"{SERVE} --seed `id`"), "p.md", "filled in by a shell"),
    "a variable": (_shell("vllm serve $MODEL"), "p.md", "filled in by a shell"),
    "a variable in braces": (_shell("vllm serve ${MODEL:-x}"), "p.md", "filled in by a shell"),
    "a pipe": (_shell(f"{SERVE} | tee log"), "p.md", "is work for a shell"),
    "a redirection": (_shell(f"{SERVE} > /etc/passwd"), "p.md", "is work for a shell"),
    "a here-document": (_shell(f"{SERVE} << EOF\nx\nEOF"), "p.md", "is work for a shell"),
    "a background job": (_shell(f"{SERVE} &"), "p.md", "is work for a shell"),
    "a second command": (_shell(f"{SERVE}; rm -rf /"), "p.md", "is work for a shell"),
    "a second command after &&": (_shell(f"true && {SERVE}"), "p.md", "is work for a shell"),
    "a second line": (_shell(f"{SERVE}\nrm -rf /"), "p.md", "more than one command"),
    "two starts": (_shell(f"{SERVE}\n{SERVE}"), "p.md", "more than one command"),
    "a placeholder": (_shell("vllm serve <your-model>"), "p.md", "is work for a shell"),
    "a comment inside": (_shell(f"{SERVE} # --seed 1"), "p.md", "has a comment inside"),
    "a quote without an end": (_shell(f"{SERVE} --seed '1"), "p.md", "cannot be split"),
    "an invisible character": (_shell(f"{SERVE} --seed 1\u202e2"), "p.md", "invisible character"),
    "an escape": (_shell(f"{SERVE} --seed \x1b[2J"), "p.md", "invisible character"),
    "a container": (
        _shell("docker run vllm/vllm-openai vllm serve Org/Model"),
        "p.md",
        "it starts docker",
    ),
    "another user": (_shell(f"sudo -u root {SERVE}"), "p.md", "it starts sudo"),
    "a path for a model": (_shell("vllm serve ../../etc"), "p.md", "no repository of the Hub"),
    "an address for a model": (
        _shell("vllm serve http://example.org/m"),
        "p.md",
        "no repository of the Hub",
    ),
    "a word too many": (_shell(f"{SERVE} other"), "p.md", "is a word that no flag takes"),
    "code of the repository": (
        _shell(f"{SERVE} --trust-remote-code"),
        "p.md",
        "runs Python of the model's repository",
    ),
    "code of the repository, otherwise spelled": (
        _shell(f"{SERVE} --trust_remote_code"),
        "p.md",
        "runs Python of the model's repository",
    ),
    "the beginning of it": (
        _shell(f"{SERVE} --trust-remote"),
        "p.md",
        "runs Python of the model's repository",
    ),
    "a plugin": (
        _shell(f"{SERVE} --tool-parser-plugin /tmp/x.py"),
        "p.md",
        "loads code, files or keys",
    ),
    "middleware": (_shell(f"{SERVE} --middleware a.b"), "p.md", "loads code, files or keys"),
    "a key": (_shell(f"{SERVE} --api-key abc"), "p.md", "loads code, files or keys"),
    "a preloaded library": (
        _shell(f"LD_PRELOAD=/tmp/x.so {SERVE}"),
        "p.md",
        "LD_PRELOAD: is no variable of the engine",
    ),
    "a path for Python": (
        _with("model", base_env={"PYTHONPATH": "/tmp"}),
        "m.yaml",
        "PYTHONPATH: is no variable",
    ),
    "a variable that no version has": (
        _shell(f"VLLM_GO_FASTER=1 {SERVE}"),
        "p.md",
        "is no variable of vLLM",
    ),
    "a line without an end": (b"x" * 30_000, "p.md", "line 1 has 30000 characters"),
    "a file without an end": (b"x\n" * (1 << 20), "p.md", "larger than 1048576 bytes"),
    "a binary file": (b"# a\n\0\0\n", "p.md", "is a binary file"),
    "another encoding": (b"# \xff\xfe\n", "p.md", "is not UTF-8"),
    "an unknown ending": (b"vllm serve Org/Model\n", "p.sh", "ends with .sh"),
    "no command": (b"# Nothing\n", "p.md", "names no start of vLLM or SGLang"),
    "other YAML": (b"a: 1\n", "m.yaml", "has neither `model` and `variants`"),
    "a list": (b"- 1\n", "m.yaml", "valid dictionary"),
    "broken YAML": (b"a: [\n", "m.yaml", "not valid YAML"),
    "aliases that unfold": (
        b"a: &a [x, x]\nb: &b [*a, *a]\nmodel: *b\n",
        "m.yaml",
        "aliases are not allowed",
    ),
    "YAML without a bottom": (
        b"model: " + b"[" * 60 + b"]" * 60 + b"\n",
        "m.yaml",
        "levels deep",
    ),
    "an object of Python": (
        b"model: !!python/object/apply:os.system [id]\nvariants: {}\n",
        "m.yaml",
        "not valid YAML",
    ),
    "a key twice": (b"model: 1\nmodel: 2\n", "m.yaml", "appears twice"),
    "arguments that are no list": (_with("model", base_args="--seed 1"), "m.yaml", "base_args"),
    "code in a page": (
        PAGE.replace("flags: [", "flags: [...common, ").encode(),
        "p.jsx",
        "is not a list of texts",
    ),
    "a template in a page": (
        PAGE.replace('"--tp 2"', "`--tp ${n}`").encode(),
        "p.jsx",
        "is not a list of texts",
    ),
    "a function in a page": (
        PAGE.replace("env: [", "env: make([").encode(),
        "p.jsx",
        "code is not run",
    ),
    "a shell in a page": (
        PAGE.replace("--tp 2", "--tp $(id)").encode(),
        "p.jsx",
        "filled in by a shell",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_not_one_plain_command_is_refused(
    sm120: Command, tmp_path: Path, kind: str
) -> None:
    data, name, reason = HOSTILE[kind]
    out = tmp_path / "out"
    out.mkdir()
    variant = ("--pick", "variant/default") if name == "m.yaml" and b"guide" in data else ()
    ended = _import(sm120, _file(tmp_path, data, name), "--output", out, *variant)
    assert (ended.code, ended.error) == (10, "RecipeInvalid"), ended.err
    assert reason in ended.err
    assert list(out.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("{repo}@0123456789abcdef0123456789abcdef01234567:" + PATH, "has no commit"),
        ("{repo}@no-branch:" + PATH, "has no commit"),
        ("{repo}@HEAD:no.yaml", "has no file no.yaml"),
        ("{repo}@HEAD:models", "has no file models"),
        ("{repo}@HEAD:../x.yaml", "has no file"),
        ("{repo}/no@HEAD:" + PATH, "is no git checkout"),
        ("{repo}/no.yaml", "cannot be read"),
    ],
)
def test_a_place_that_is_not_there_is_named(
    sm120: Command, repo: Path, place: str, reason: str
) -> None:
    ended = _import(sm120, place.format(repo=repo))
    assert (ended.code, ended.error) == (10, "RecipeInvalid"), ended.err
    assert reason in ended.err


def test_a_partial_clone_asks_nobody_for_what_it_lacks(
    sm120: Command, repo: Path, tmp_path: Path
) -> None:
    _git(repo, "config", "uploadpack.allowFilter", "true")
    partial = tmp_path / "partial"
    clone = [
        "git",
        "clone",
        "-q",
        "--no-checkout",
        "--filter=blob:none",
        f"file://{repo}",
        str(partial),
    ]
    subprocess.run(clone, check=True, capture_output=True)
    ended = _import(sm120, f"{partial}@HEAD:{PATH}")
    assert "has no file" in ended.err


def test_several_commands_ask_which(sm120: Command, repo: Path) -> None:
    ended = _import(sm120, f"{repo}@HEAD:{PATH}")
    assert "which command?" in ended.err
    assert "variant/default, variant/nvfp4, command/1" in ended.err
    assert "there is no command 'x'" in _import(sm120, f"{repo}@HEAD:{PATH}", "--pick", "x").err


def test_servers_that_are_apart_are_refused(sm120: Command, tmp_path: Path) -> None:
    path = _file(tmp_path, yaml.safe_dump(COOKBOOK).encode(), "model.yaml")
    ended = _import(sm120, path, "--pick", "Model/B200/apart")
    assert "prefill and decode run on different servers" in ended.err


def test_a_dropped_flag_is_written_down_and_remote_code_is_taken_on_request(
    sm120: Command, tmp_path: Path
) -> None:
    path = _file(tmp_path, _shell(f"{SERVE} --old-flag 3 --trust-remote-code"))
    ended = _import(sm120, path, "--drop", "--old-flag", "--allow-remote-code", "--json")
    assert ended.code == 0, ended.err
    (change,) = ended.json["recipe"]["changes"]
    assert (change["document"], change["here"]) == ("--old-flag 3", "nothing")
    assert ended.json["recipe"]["flags"]["upstream"] == {"trust_remote_code": True}


@pytest.mark.parametrize("words", [("--feature", "none"), ("--feature", "tool_calling")])
def test_a_feature_that_a_file_does_not_have_is_refused(
    sm120: Command, repo: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    ended = _import(sm120, _file(tmp_path, _shell(SERVE)), *words)
    assert "are for vLLM's recipes" in ended.err
    if "none" in words:
        ended = _import(sm120, f"{repo}@HEAD:{PATH}", *words)
        assert "has no feature 'none' (it has long_context" in ended.err


def test_words_are_those_of_a_shell() -> None:
    command = '$ A=1 vllm serve a/b \\\n  --x \'{"a": "$b"}\' \\\n  --y=2'
    assert words_of(command) == ["A=1", "vllm", "serve", "a/b", "--x", '{"a": "$b"}', "--y=2"]


def test_two_recipes_are_compared_with_all_that_they_extend(sm120: Command) -> None:
    names = ("qwen38-27b-nvfp4-vllm-1x", "qwen38-27b-nvfp4-vllm-2x-5090")
    rows = sm120("--checkout", ROOT, "recipe", "diff", *names, "--json").json
    found = {row["what"]: (row["before"], row["after"]) for row in rows}
    assert found["flags.tensor_parallel_size"] == ("1", "2")
    assert found["hardware.card"] == ("rtx-pro-6000", "rtx-5090")
    assert "name" not in found
    same = sm120("--checkout", ROOT, "recipe", "diff", names[0], names[0])
    assert ("0 differences" in same.err, same.out) == (True, "")
    assert sm120("--checkout", ROOT, "recipe", "diff", names[0], "no").error == "UnknownRecipe"


def _drift(sm120: Command, repo: Path, own: Path, *more: str | Path) -> Ended:
    words = ("recipe", "drift", "mine", "--recipes", own, "--upstream")
    return sm120("--checkout", ROOT, *words, *(more or (repo,)), "--json")


@pytest.fixture
def own(sm120: Command, repo: Path, tmp_path: Path) -> Path:
    """A folder with a recipe that was imported from the checkout."""
    folder = tmp_path / "own"
    folder.mkdir()
    ended = _import(sm120, f"{repo}@HEAD:{PATH}", "--pick", "variant/nvfp4", "--output", folder)
    assert ended.code == 0, ended.err
    return folder


def test_a_document_that_stayed_the_same_is_no_drift(sm120: Command, repo: Path, own: Path) -> None:
    _commit(repo, b"other\n", "other.txt")
    ended = _drift(sm120, repo, own)
    assert (ended.code, [row["state"] for row in ended.json]) == (0, ["same"])


def test_a_document_that_moved_is_named_with_every_flag(
    sm120: Command, repo: Path, own: Path
) -> None:
    first = _git(repo, "rev-parse", "HEAD")
    changed = {**VLLM["model"], "base_args": ["--max-model-len", "16384", "--seed", "1"]}
    second = _commit(repo, yaml.safe_dump({**VLLM, "model": changed}).encode())
    ended = _drift(sm120, repo, own)
    assert (ended.code, ended.error) == (11, "UpstreamMoved")
    (row,) = json.loads(ended.out)
    assert (row["state"], row["commit"]) == ("moved", first)
    found = {each["what"]: (each["before"], each["after"]) for each in row["differences"]}
    assert found["variant.nvfp4.--max-model-len"] == ("8192", "16384")
    assert found["variant.nvfp4.--seed"] == (None, "1")
    # a commit that is named counts, and an older one is no drift of a newer
    assert _drift(sm120, repo, own, f"{repo}@{first}").code == 0
    assert second != first


def test_words_alone_are_told_from_commands(sm120: Command, repo: Path, own: Path) -> None:
    _commit(repo, yaml.safe_dump({**VLLM, "meta": {"title": "New words"}}).encode())
    ended = _drift(sm120, repo, own)
    assert ended.code == 11
    assert json.loads(ended.out)[0]["why"].endswith("its commands are the same")


def test_a_document_that_is_gone_or_cannot_be_read_is_drift(
    sm120: Command, repo: Path, own: Path
) -> None:
    _commit(repo, b"- 1\n")
    ended = _drift(sm120, repo, own)
    assert (ended.code, json.loads(ended.out)[0]["state"]) == (11, "moved")
    assert "its commands cannot be compared" in json.loads(ended.out)[0]["why"]
    _git(repo, "rm", "-q", PATH)
    _git(repo, "commit", "-q", "-m", "x")
    assert json.loads(_drift(sm120, repo, own).out)[0]["state"] == "gone"


def test_what_a_checkout_does_not_have_is_unknown(
    sm120: Command, repo: Path, own: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    _git(other, "init", "-q")
    _git(other, "remote", "add", "origin", "https://token@example.org/project/recipes")
    _commit(other, b"x\n", "x.txt")
    (row,) = _drift(sm120, other, own).json
    assert (row["state"], row["why"]) == ("unknown", "the checkout does not have its commit")
    # a history that was written anew does not come after it
    _git(repo, "checkout", "-q", "--orphan", "new")
    _commit(repo, b"x\n", "x.txt")
    assert "does not come after it" in _drift(sm120, repo, own).json[0]["why"]
    # another project's checkout has nothing to say
    _git(other, "remote", "set-url", "origin", "https://example.org/another/project")
    assert _drift(sm120, other, own).json == []


@pytest.mark.parametrize("place", ["no-folder", ".", "upstream@no-branch"])
def test_an_upstream_that_is_no_checkout_is_an_error(
    sm120: Command, repo: Path, own: Path, place: str
) -> None:
    ended = _drift(sm120, repo, own, place)
    assert (ended.code, ended.error) == (10, "RecipeInvalid")


def test_too_many_commands_are_refused() -> None:
    from pathlib import PurePath

    from pipeline.core.errors import RecipeInvalid

    with pytest.raises(RecipeInvalid, match="more than 400 commands"):
        read_commands(_shell(SERVE) * 401, PurePath("p.md"))


def test_an_address_is_not_taken_for_a_file(sm120: Command) -> None:
    ended = _import(sm120, "https://github.com/o/r/blob/main/a.yaml", "--list")
    assert ended.error == "RecipeInvalid"
    assert "is an address, and this command downloads nothing" in ended.err
    assert "REPO@COMMIT:PATH" in ended.err


def test_a_port_that_the_recipe_keeps_is_no_difference(sm120: Command, tmp_path: Path) -> None:
    for port, found in (("8000", []), ("9000", ["--port"])):
        path = _file(tmp_path, _shell(f"vllm serve Org/Model --port {port}"), "page.md")
        rows = _import(sm120, path, "--json").json["differences"]
        assert [row["what"] for row in rows] == found
    assert (rows[0]["before"], rows[0]["after"]) == ("9000", "8000")


def test_a_flag_to_drop_that_the_command_lacks_and_an_unknown_image_are_refused(
    sm120: Command, tmp_path: Path
) -> None:
    path = _file(tmp_path, _shell("vllm serve Org/Model --max-model-len 8192"), "page.md")
    ended = _import(sm120, path, "--drop", "--max-model")
    assert ended.error == "RecipeInvalid"
    assert "--drop --max-model: the command does not have it" in ended.err
    assert "It has --max-model-len." in ended.err
    assert _import(sm120, path, "--image", "nope").error == "UnknownImage"


def test_a_container_is_listed_and_refused(sm120: Command, tmp_path: Path) -> None:
    for image in ("vllm/vllm-openai:latest", "lmsysorg/sglang:v0.5"):
        run = f"docker run --gpus all \\\n  {image} --model Org/Model"
        path = _file(tmp_path, _shell(run), "page.md")
        listed = _import(sm120, path, "--list")
        assert "refused: it starts docker, not an engine" in listed.out


def test_the_folder_of_a_new_recipe_is_made(sm120: Command, tmp_path: Path) -> None:
    path, folder = _file(tmp_path, _shell("vllm serve Org/Model"), "page.md"), tmp_path / "a" / "b"
    assert _import(sm120, path, "--output", folder).code == 0
    assert len([*folder.iterdir()]) == 1


@pytest.mark.parametrize("name", ["Bad Name", "", "a/b", "-8x"])
def test_a_name_that_is_none_is_refused(sm120: Command, tmp_path: Path, name: str) -> None:
    path = _file(tmp_path, _shell("vllm serve Org/Model"), "page.md")
    ended = _import(sm120, path, f"--name={name}", "--output", tmp_path / "mine")
    assert ended.error == "RecipeInvalid"
    assert f"--name: {name!r} is no name for a recipe" in ended.err
    assert not (tmp_path / "mine").exists()
