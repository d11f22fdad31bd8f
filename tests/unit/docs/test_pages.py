"""The pages agree with the code and with the tree."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from pipeline import __version__
from pipeline.core.errors import (
    EvidenceBroken,
    EvidenceIncomplete,
    EvidenceStale,
    EvidenceUnsigned,
    NumberChanged,
    TagMoved,
)
from pipeline.hosts.probes.runner import NCCL_LIBRARY, NCCL_SETTINGS
from tests.docs.commands import complaint, options, refusal
from tests.docs.error_table import error_families, error_kinds
from tests.docs.pages import DOCS, ROOT, Page, pages
from tests.docs.references import GENERATED, generated

PAGES = pages()
README = Page(ROOT / "README.md")
GOLDEN = yaml.safe_load((ROOT / "lockfiles" / "golden.yaml").read_text(encoding="utf-8"))
# what a path in a page begins with when it means a file of this checkout
_TREES = ("pipeline/", "tests/", "images/", "lockfiles/", "ansible/", "docs/", ".ci/")
# files that users make, so they are not in the repository
_MADE = {"lockfiles/trust.yaml", "lockfiles/host.lock.yaml"}

# bare options of other programs: docker, the engines, `python -m tests.docs`
_FOREIGN_OPTIONS = {
    *("--ipc", "--trust-remote-code", "--record", "--enable-metrics", "--metrics"),
    "--chat-template-content-format",
    # of the engines and of srun, for several nodes
    *("--nnodes", "--master-addr", "--master-port", "--headless", "--api-server-count"),
    *("--distributed-executor-backend", "--data-parallel-backend", "--dist-init-addr"),
    *("--dp-size", "--enable-dp-attention", "--pp-size", "--enable-mixed-chunk"),
    "--kill-on-bad-exit",
}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == generated()[DOCS / name], "run `python -m tests.docs --write`"


@every_page
def test_every_command_of_a_page_exists_with_its_options(page: Page) -> None:
    assert [wrong for line in page.commands() if (wrong := complaint(line))] == []


@every_page
def test_every_command_in_a_block_can_be_typed_as_it_stands(page: Page) -> None:
    assert [wrong for line in page.typed() if (wrong := refusal(line))] == []


@pytest.mark.parametrize(
    "line",
    [
        "sm120 load",
        "sm120 load sglang-k2 vllm",
        "sm120 load sglang-k3",
        "sm120 build vllm sglang-k3",
        "sm120 serve tiny-gpu",
        "sm120 build vllm --platform linux/riscv64",
        "sm120 gate run sglang-k2 --only speed",
        "sm120 weights fit kimi-k2.6 --gpu-count many",
        "sm120 weights fetch kimi-k2.6 --output",
        "sm120 bench http://gpu1:8000 --concurrency one",
        "sm120 --loud build",
        "sm120 verify no-such-file.html --look-in",
        "nox -s verify-hosts -- -i INVENTORY --functions",
        "python3 noxfile.py -s gate -- sglang-k2 --only speed",
    ],
)
def test_a_command_that_the_parser_refuses_is_noticed(line: str) -> None:
    assert refusal(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "sm120 bench http://gpu1:8000 --concurrency 1,8",
        "sm120 verify no-such-file.html --look-in no-such-folder",
        "sm120 --store other build demo >> log",
        "sm120 image",
        "docker run --everything",
    ],
)
def test_a_command_that_the_parser_takes_is_not_complained_about(line: str) -> None:
    assert refusal(line.split()) == ""


@pytest.mark.parametrize(
    "line",
    [
        ["nox", "-s", "perf", "--", "--only-speed"],
        ["nox", "-s", "mutants", "--", "net", "--sample", "few"],
        ["nox", "-s", "lock", "--", "--newest"],
        ["sm120", "bild"],
        ["sm120", "build", "--fast"],
        ["sm120", "weights", "eat"],
        ["sm120", "--loud", "build"],
        ["nox", "-s", "deploy"],
        ["nox", "-s", "provision", "--", "--everything"],
        [".nox/run/bin/sm120", "lode", "sglang-k2"],
    ],
    ids=" ".join,
)
def test_a_command_that_does_not_exist_is_noticed(line: list[str]) -> None:
    assert complaint(line)


@every_page
def test_every_option_that_a_page_names_alone_is_one_of_some_command(page: Page) -> None:
    assert [o for o in page.bare_options() if o not in options() | _FOREIGN_OPTIONS] == []


def test_an_option_in_brackets_after_a_command_belongs_to_that_command(tmp_path: Path) -> None:
    # `--diff` is an option of another command, so that it exists somewhere is not enough
    (tmp_path / "page.md").write_text("Use `sm120 image lock IMAGE` (`--diff` shows it first).\n")
    (line,) = [line for line in Page(tmp_path / "page.md").commands() if "--diff" in line]
    assert "--diff" in options()
    assert complaint(line)


@every_page
def test_every_link_leads_somewhere(page: Page) -> None:
    wrong = []
    for link in page.links:
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.path.parent / file).resolve() if file else page.path
        is_there = target.exists() and (not anchor or anchor in Page(target).anchors)
        wrong += [] if is_there else [link]
    assert wrong == []


@every_page
def test_every_path_that_a_page_names_exists(page: Page) -> None:
    wrong = []
    for span in page.spans:
        path = span.partition(" ")[0].partition(":")[0]
        if path.startswith(_TREES) and path not in _MADE and not any(c in path for c in "<>…"):
            wrong += [] if (ROOT / path).exists() or list(ROOT.glob(path)) else [path]
    assert wrong == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, todo = set(), [README]
    while todo:
        page = todo.pop()
        seen.add(page.path)
        targets = {(page.path.parent / link.partition("#")[0]).resolve() for link in page.links}
        todo += [Page(t) for t in targets if t.suffix == ".md" and t.is_file() and t not in seen]
    assert [p.name for p in PAGES if p.path not in seen] == []


def test_the_readme_is_short() -> None:
    lines = README.text.splitlines()
    assert len(lines) <= 120
    fences = [i for i, line in enumerate(lines) if line.startswith("```")]
    for start, end in zip(fences[::2], fences[1::2], strict=True):
        assert [line for line in lines[start:end] if len(line) > 100] == []


def test_the_readme_lists_every_image_that_has_a_golden_digest() -> None:
    names = {name.rpartition(".")[0] for name in GOLDEN["images"]}
    assert [name for name in sorted(names) if f"`{name}`" not in README.text] == []


def test_every_error_stands_once_under_its_exit_code() -> None:
    page = (DOCS / "exit-codes.md").read_text("utf-8")
    for family in error_families():
        (section,) = re.findall(
            rf"^## Exit code {family.exit_code}$.*?(?=^## |\Z)", page, re.M | re.S
        )
        assert re.findall(r"^\| `(\w+)` ", section, re.M) == [
            kind.__name__ for kind in error_kinds(family)
        ]


def test_the_verdicts_of_verify_have_the_exit_codes_of_their_errors() -> None:
    rows = re.findall(
        r"^\| (\w+) \| (\d+) \|", (DOCS / "evidence-reference.md").read_text("utf-8"), re.M
    )
    kinds = (TagMoved, EvidenceStale, EvidenceBroken, EvidenceUnsigned, EvidenceIncomplete)
    names = ("moved", "stale", "broken", "unsigned", "incomplete")
    codes = {name: kind.exit_code for name, kind in zip(names, kinds, strict=True)}
    codes["changed"] = NumberChanged.exit_code
    assert {name: int(code) for name, code in rows} == {"valid": 0, **codes}


@every_page
def test_whole_digests_of_engine_images_are_the_golden_ones(page: Page) -> None:
    golden = {name: one["digest"] for name, one in GOLDEN["images"].items()}
    wrong = [
        line
        for line in page.text.splitlines()
        for name in ("sglang-k2", "sglang", "vllm")
        if (match := re.match(rf"{name} .*linux/amd64 +(sha256:[0-9a-f]{{12,64}})", line))
        and not golden[f"{name}.amd64"].startswith(match[1])
    ]
    assert wrong == []


@every_page
def test_docker_tags_are_the_digests_they_stand_for(page: Page) -> None:
    tags = re.findall(r"sm120/([\w-]+):([0-9a-f]{12})\b", page.text)
    golden = {
        (name.rpartition(".")[0], one["digest"][7:19]) for name, one in GOLDEN["images"].items()
    }
    assert [t for t in tags if t not in golden] == []


def test_an_engine_is_started_with_the_hosts_nccl_settings_and_library() -> None:
    blocks = [b.text for p in PAGES for b in p.blocks if b.kind == "sh" and "--gpus all" in b.text]
    settings, library = map(str, (NCCL_SETTINGS, NCCL_LIBRARY))
    (block,) = [b for b in blocks if "nccl" in b]
    assert f"--env-file {settings}" in block
    assert f"-v {library}:{library}:ro" in block
    assert '"${nccl[@]}"' in block.partition("docker run")[2]
    role = yaml.safe_load((ROOT / "ansible/roles/nccl/vars/main.yml").read_text(encoding="utf-8"))
    assert str(Path(role["nccl_library"]).parent) == library
    assert settings in (ROOT / "ansible/roles/nccl/tasks/present.yml").read_text(encoding="utf-8")


def test_the_changelog_begins_with_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d+\.\d+\.\d+)", changelog, re.M)
    assert newest
    assert newest[1] == __version__


def test_the_gate_in_the_picture_has_the_numbers_of_the_patch() -> None:
    picture = (DOCS / "gate.svg").read_text(encoding="utf-8")
    series = (ROOT / "images/sglang-k2/patches/series.yaml").read_text(encoding="utf-8")
    numbers = set(re.findall(r"\d{2,3},\d{3}", picture))
    assert numbers == {"106,496", "101,376", "71,680"}
    assert all(number.replace(",", "") in series for number in numbers)


def test_the_table_of_the_documents_counts_its_rows_and_leaves_few_open() -> None:
    text = (ROOT / "docs" / "where-it-comes-from.md").read_text(encoding="utf-8")
    stated = dict(re.findall(r"^\| (works|differs|partly|missing) \| (\d+) \|", text, re.MULTILINE))
    row = re.compile(r"^\| (\d+)(?:–(\d+))? \|.*\| (\w+)([:;, (][^|]+)? \|$", re.MULTILINE)
    counted: Counter[str] = Counter()
    for first, last, verdict, reason in row.findall(text):
        counted[verdict] += int(last or first) - int(first) + 1
        assert reason or verdict == "works", f"row {first} has no reason"
    assert {verdict: str(rows) for verdict, rows in counted.items()} == stated
    assert counted.total() == 181
    assert counted.total() - counted["works"] <= 15
