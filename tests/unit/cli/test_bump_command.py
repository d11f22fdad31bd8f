"""`sm120 bump`: newer versions of a small engine, judged on pages, with planted regressions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.app import bump as bumps
from pipeline.app.bump import Bump, JudgedGate, LockFacts, require_takeable
from pipeline.core.errors import BumpWaits, GateUnknown
from pipeline.images.gate.patches import PatchVerdict
from pipeline.images.gate.runs import ImageRun, RunTest
from pipeline.images.spec.checkout import Checkout
from tests import makers
from tests.testbed.fault_server import FaultServer
from tests.unit.binary.arch_files import DATA
from tests.unit.support import AMD64, Command, make_wheel

CODE = b"def greet():\n    return 'hello'\n"
RUNS, OTHER_CARD = (DATA / name for name in ("mixed.so", "hopper.so"))


@pytest.fixture(autouse=True)
def world(server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """An image whose engine has machine code and a patch, and three newer versions of it."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("UV_DEFAULT_INDEX", server.index)
    monkeypatch.setenv("PIP_INDEX_URL", server.index)
    started = ImageRun(kind="start", tests=[RunTest(name="imports", verdict="passed")])
    monkeypatch.setattr(bumps, "prove_starts", lambda *_: {None: started})
    wheels = {
        "1.0": (CODE, RUNS, ()),
        "1.1": (CODE, RUNS, ("dep-a",)),
        "1.2": (CODE, OTHER_CARD, ()),
        "1.3": (CODE.replace(b"'hello'", b"'hi'"), RUNS, ()),
        "2.0": (CODE, RUNS, ("nobody-has-this",)),
    }
    served = tmp_path / "served"
    for version, (code, library, requires) in wheels.items():
        files = {"thing/__init__.py": code, "thing/kernels.so": library.read_bytes()}
        files["nvidia/cu13/include/cuda.h"] = b"/* a CUDA home */\n"
        path = make_wheel(served, "thing", version, requires=requires, files=files)
        server.add(path.name, path.read_bytes())
    path = make_wheel(served, "dep-a")
    server.add(path.name, path.read_bytes())
    edit = makers.Edit("thing/__init__.py", CODE, CODE.replace(b"hello", b"hello, SM120"))
    more = {"gate": None, "no_gate": "changes a greeting"}
    spec = {
        **{"name": "tiny", "summary": "Thing 1.0 in a small image", "platforms": [AMD64]},
        **{"debian": {}, "python": {"requirements": ["thing==1.0"]}, "gates": ["arch"]},
        "cuda": {"from": ["nvidia/cu13"], "architectures": ["sm_120"]},
        "patches": "patches/series.yaml",
    }
    image = makers.Image(spec, [served / "thing-1.0-py3-none-any.whl"])
    image.files |= makers.patch_files(edit, applies_to="thing==1.0", **more)
    return makers.make_checkout(tmp_path, image)


@pytest.fixture(autouse=True)
def quick(no_slow_helpers: None) -> None:
    """Builds start no processes."""


def files_of(checkout: Checkout) -> dict[str, bytes]:
    folders = (checkout.root / "images", checkout.root / "lockfiles")
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(checkout.root)): path.read_bytes() for path in paths}


def test_a_version_that_passes_everything_may_be_taken_and_nothing_else_changes(
    sm120: Command, world: Checkout, tmp_path: Path
) -> None:
    before, page = files_of(world), tmp_path / "page"
    ended = sm120("bump", "tiny", "--to", "1.1", "--output", page)
    assert ended.code == 0, ended.err
    assert "tiny with thing 1.1 (now 1.0): take it. With 0001.patch." in ended.out
    assert files_of(world) == before
    for ending in (".md", ".html"):
        text = page.with_name(f"page{ending}").read_text(encoding="utf-8")
        assert "take it. With 0001.patch." in text
        assert "dep-a" in text
    (found,) = json.loads(page.with_name("page.json").read_bytes())
    assert (found["advice"], found["reasons"]) == ("take with patches", [])
    assert {m["name"] for m in found["moves"]} == {"thing", "dep-a"}
    assert [g["gate"] for g in found["gates"]] == ["arch", "start"]
    assert found["licences"] is not None


def test_a_second_run_finds_what_was_judged_and_judges_nothing_again(
    sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sm120("bump", "tiny", "--to", "1.1", "--json").json
    monkeypatch.setattr(bumps, "build_images", None)
    monkeypatch.setattr(bumps, "run_gates", None)
    monkeypatch.setattr(bumps, "lock_images", None)
    second = sm120("bump", "tiny", "--to", "1.1", "--json").json
    assert [each.pop("is_kept") for each in (*first, *second)] == [False, True]
    assert first == second


def test_offline_asks_no_index_and_judges_what_is_kept(
    sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = sm120("bump", "tiny", "--to", "1.1", "--offline")
    assert (ended.code, ended.error) == (22, "OfflineMiss")
    assert "tiny with thing 1.1: the store keeps no lock of it for linux/amd64" in ended.err
    for asked in ((), ("--to", "thing>=1.1")):
        ended = sm120("bump", "tiny", *asked, "--offline")
        assert (ended.code, ended.error) == (22, "OfflineMiss")
        assert "only an index says which versions of thing there are" in ended.err
    assert sm120("bump", "tiny", "--to", "1.1").code == 0
    monkeypatch.setattr(bumps, "lock_images", None)
    monkeypatch.setattr(bumps, "versions_against", None)
    (kept,) = sm120("bump", "tiny", "--to", "1.1", "--offline", "--json").json
    assert (kept["advice"], kept["is_kept"]) == ("take with patches", True)


def test_an_edited_case_or_patch_is_judged_anew(sm120: Command, world: Checkout) -> None:
    assert not sm120("bump", "tiny", "--to", "1.1", "--json").json[0]["is_kept"]
    (world.folder("tiny") / "gates").mkdir()
    (world.folder("tiny") / "gates" / "arch.yaml").write_text("accepted: {}\n")
    assert not sm120("bump", "tiny", "--to", "1.1", "--json").json[0]["is_kept"]


def test_a_build_that_lost_the_card_is_named(sm120: Command) -> None:
    ended = sm120("bump", "tiny", "--to", "1.2")
    assert (ended.code, ended.error) == (50, "BumpWaits")
    assert "wait. Arch on sm_120: failed" in ended.err
    assert "thing/kernels.so" in ended.err


def test_a_patch_that_does_not_fit_is_a_conflict(sm120: Command, world: Checkout) -> None:
    before = files_of(world)
    ended = sm120("bump", "tiny", "--to", "1.3", "--write")
    assert (ended.code, ended.error) == (50, "BumpWaits")
    assert "wait. Build: failed: 0001.patch: thing/__init__.py" in ended.err
    assert files_of(world) == before


def test_a_version_that_cannot_be_locked_waits_in_the_resolvers_words(sm120: Command) -> None:
    # the newest, which nobody named
    ended = sm120("bump", "--all")
    assert (ended.code, ended.error) == (50, "BumpWaits")
    assert "thing 2.0 (now 1.0): wait. It cannot be locked" in ended.err
    assert "nobody-has-this" in ended.err


def test_one_page_holds_several_versions_and_older_ones_too(sm120: Command, tmp_path: Path) -> None:
    ended = sm120("bump", "--all", "--to", "thing>=1.1,<1.3", "--output", tmp_path / "page")
    assert ended.code == 50
    found = json.loads((tmp_path / "page.json").read_bytes())
    assert [(x["version"], x["advice"]) for x in found] == [
        ("1.1", "take with patches"),
        ("1.2", "wait"),
    ]


def test_what_is_written_builds_and_is_then_the_newest(sm120: Command, world: Checkout) -> None:
    assert sm120("bump", "tiny", "--to", "1.1", "--write").code == 0
    spec, lock = world.spec("tiny"), world.lock_path("tiny", AMD64).read_text()
    assert spec.python
    assert spec.python.requirements == ["thing==1.1"]
    assert '"version": "1.1"' in lock
    (patch,) = world.series(spec).patches
    assert (patch.applies_to, patch.files[0].before is not None) == ("thing==1.1", True)
    assert sm120("image", "lock", "--check").code == 0
    assert sm120("build", "tiny", "--accept").code == 0
    (row,) = sm120("bump", "tiny", "--to", "1.1", "--json").json
    assert row["advice"] == "nothing newer"


def test_what_was_not_built_is_unknown_and_means_to_wait(sm120: Command) -> None:
    ended = sm120("bump", "tiny", "--to", "1.1", "--no-build")
    assert (ended.code, ended.error) == (51, "GateUnknown")
    assert "not judged: the image was not built" in ended.err


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        ((), 2, "Name an image, or --all, and not both."),
        (("tiny", "--all"), 2, "Name an image, or --all, and not both."),
        (("tiny", "--to", "9.9"), 50, "9.9"),
        (("tiny", "--to", "thing=1"), 10, "neither a version nor a requirement"),
        (("nobody",), 41, "nobody"),
    ],
)
def test_what_cannot_be_judged_is_refused_with_the_reason(
    sm120: Command, words: tuple[str, ...], code: int, why: str
) -> None:
    ended = sm120("bump", *words)
    assert ended.code == code or why == "9.9", ended.err
    assert why in ended.err


FACTS = LockFacts(version="1", wheels=2, size_bytes=9, cuda="13.0", torch="2.13.0", triton="3.7.1")


def judged(**more: Any) -> Bump:
    about = {"image": "vllm", "platform": AMD64, "engine": "vllm", "locked": "1", "version": "2"}
    return Bump.model_validate({**about, "before": FACTS, "after": FACTS, **more})


def verdict(state: str) -> PatchVerdict:
    body = {
        "patch": "0001.patch",
        "gate": "smem-x",
        "version": "2",
        "message": "why",
        "state": state,
    }
    return PatchVerdict.model_validate(body)


@pytest.mark.parametrize(
    ("more", "advice", "said"),
    [
        ({}, "take", "take it."),
        ({"patches": [verdict("needed")]}, "take with patches", "take it. With 0001.patch."),
        ({"patches": [verdict("upstreamed")]}, "take", "Leave out 0001.patch"),
        ({"patches": [verdict("superseded")]}, "take", "Leave out 0001.patch"),
        ({"patches": [verdict("weak")]}, "wait", "0001.patch is weak: why."),
        ({"patches": [verdict("unknown")]}, "wait", "0001.patch is unknown: why"),
        ({"after": FACTS.model_copy(update={"cuda": ""})}, "wait", "It lost its CUDA build"),
        ({"error": "it cannot be locked: x"}, "wait", "It cannot be locked: x"),
        ({"version": "1"}, "nothing newer", "1 is the newest"),
    ],
)
def test_the_recommendation_follows_from_what_was_found(
    more: dict[str, Any], advice: str, said: str
) -> None:
    found = judged(**more)
    assert found.advice == advice
    assert said in found.sentence


def test_a_kernel_over_the_limit_comes_before_what_is_only_unknown() -> None:
    over = "mla-decode: _fwd needs 106496 bytes of shared memory"
    gates = [
        JudgedGate(gate="arch", arch="sm_120", verdict="unknown", bad=["not built"]),
        JudgedGate(gate="smem", arch="sm_120", verdict="failed", counts={"failed": 1}, bad=[over]),
    ]
    found = judged(gates=gates)
    assert found.reasons[0] == f"smem on sm_120: failed (1 failed): {over}"
    with pytest.raises(BumpWaits, match="106496"):
        require_takeable([found])
    with pytest.raises(GateUnknown, match="not built"):
        require_takeable([judged(gates=gates[:1])])
    require_takeable([judged(), judged(version="1")])


def test_slurm_gets_the_cases_of_the_candidate(
    sm120: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def run_gates(_: Any, request: Any, **more: Any) -> Any:
        asked.append((request.image, more["slurm"].partition))
        return SimpleNamespace(runs=[])

    monkeypatch.setattr(bumps, "run_gates", run_gates)
    sm120("bump", "tiny", "--to", "1.1", "--on", "slurm:gpu")
    assert asked == [("tiny-at-1.1", "gpu")]


@pytest.mark.parametrize("asked", ["garbage", "other>=1"])
def test_a_version_of_another_engine_is_refused_and_not_passed_over(
    sm120: Command, asked: str
) -> None:
    for more in ((), ("--offline",)):
        ended = sm120("bump", "tiny", "--to", asked, *more)
        assert (ended.code, ended.error) == (10, "SpecInvalid")
        assert f"--to {asked}: is neither a version nor a requirement of thing" in ended.err
        assert "'thing>=0.30'" in ended.err
