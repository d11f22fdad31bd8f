"""Which entries become a warm layer, what its index says of them, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import NotReproducible, StepFailed
from pipeline.images.assemble.plan import WARM_READER, WARM_WORKER, WarmPlan, plan_image
from pipeline.images.gate.files import EngineSetup
from pipeline.images.gate.smem.engine import EngineTree
from pipeline.images.gate.smem.limits import card_for
from pipeline.images.gate.smem.results import Record
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.image import WarmSpec
from pipeline.images.warm.layer import (
    INDEX,
    EntryFault,
    entry_fault,
    pack_entries,
    read_warm,
    write_warm,
)
from pipeline.images.warm.target import (
    RootedEnvironment,
    RootedSandbox,
    WarmAnswer,
    WarmEntry,
    WarmTarget,
)
from tests.unit.gate.smem.test_results import case as make_case
from tests.unit.gate.smem.test_run import FACTS

CHECKOUT = Checkout(Path(__file__).resolve().parents[3])
CUBINS = Path(__file__).parents[1] / "binary" / "data"
CARD = card_for("sm_120")
KEY, OTHER = "A" * 52, "B" * 52


def kernel(cubin: str = "sm_120a", arch: object = 120, shared: object = 71680) -> dict[str, bytes]:
    about = {"target": {"arch": arch}, "shared": shared}
    code = (CUBINS / f"{cubin}.cubin").read_bytes()
    return {"_fwd.cubin": code, "_fwd.json": json.dumps(about).encode()}


def test_a_kernel_for_the_card_and_a_launcher_are_good() -> None:
    assert entry_fault(kernel(), CARD) == EntryFault()
    assert not entry_fault(kernel("sm_120"), CARD).message
    assert not entry_fault({"__triton_launcher.so": b"\x7fELF"}, CARD).message


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (kernel("sm_90a.ptxas-12.8"), "no kernel image"),
        (kernel(arch=90), "was compiled for sm_90"),
        (kernel(shared=106496), "needs 106496 bytes of shared memory, the card has 101376"),
        (kernel(shared=None), "its description cannot be read"),
        ({**kernel(), "_fwd.json": b"{"}, "its description cannot be read"),
        ({"_fwd.cubin": kernel()["_fwd.cubin"]}, "its description cannot be read"),
        ({**kernel(), "_fwd.cubin": kernel()["_fwd.cubin"][:300]}, "unreadable"),
        ({**kernel(), "_fwd.cubin": b"not machine code"}, "neither an ELF file"),
        ({"_fwd.json": b"{}"}, "has no machine code"),
        ({}, "has no machine code"),
    ],
)
def test_what_the_card_cannot_use_is_named(files: dict[str, bytes], reason: str) -> None:
    fault = entry_fault(files, CARD)
    assert reason in fault.message
    assert fault.is_size == ("106496" in reason)


@pytest.fixture
def target(tmp_path: Path) -> WarmTarget:
    base = plan_image(CHECKOUT, "sglang-k2", "linux/amd64")
    spec = WarmSpec(recipes={"kimi": ["extend-*"], "other": ["moe-*"]})
    plan = WarmPlan(
        "warm-image", base, spec, (("gates/smem-a.yaml", "sha256:0"),), "sha256:1", "sha256:2"
    )
    sandbox = RootedSandbox(kind="namespaces", held=[], system=str(tmp_path / "root"))
    return WarmTarget(
        open_store(tmp_path / "store"),
        RootedEnvironment(tmp_path / "environment", FACTS, ()),
        EngineTree(tmp_path, "engine", "1", f"sha256:{'0' * 64}"),
        EngineSetup(package="engine"),
        CARD,
        plan,
        f"sha256:{'2' * 64}",
        sandbox=sandbox,
    )


def packed(files: dict[str, bytes]) -> dict[str, str]:
    return {n: base64.b85encode(zlib.compress(data)).decode() for n, data in files.items()}


def answer(name: str, *entries: WarmEntry, **more: Any) -> tuple[Any, WarmAnswer]:
    case = make_case(name=name, kernels=["_fwd"])
    return case, WarmAnswer(case=name, ended="called", entries=list(entries), **more)


def entry(files: dict[str, bytes], key: str = KEY, name: str = "_fwd") -> WarmEntry:
    return WarmEntry(key=key, kernel=name, module="engine.ops", files=packed(files))


def test_the_index_names_files_cases_and_recipes_of_each_entry(target: WarmTarget) -> None:
    both = [answer("extend-1", entry(kernel())), answer("moe-1", entry(kernel()))]
    index, files = pack_entries(target, both, {})
    code = kernel()["_fwd.cubin"]
    known = index.entries[KEY]
    assert known.cases == ["extend-1", "moe-1"]
    assert known.recipes == ["kimi", "other"]
    assert known.files["_fwd.cubin"] == hashlib.sha256(code).hexdigest()
    assert files[f"opt/warm/triton/{KEY}/_fwd.cubin"] == code
    assert files[f"{target.plan.base.venv.site}/sm120_warm.py"] == WARM_READER.read_bytes()
    assert json.loads(files[INDEX])["triton"] == FACTS.triton
    assert not index.missing


def test_the_order_of_answers_decides_no_byte(target: WarmTarget) -> None:
    answers = [answer("a", entry(kernel(), OTHER)), answer("b", entry(kernel()))]
    layers = [
        write_warm(target.store, target.plan, pack_entries(target, order, {})[1])
        for order in (answers, answers[::-1])
    ]
    assert layers[0].digest == layers[1].digest
    kept = read_warm(target.store, target.plan)
    assert kept
    assert [*kept.entries] == [KEY, OTHER]


def test_what_was_left_out_is_listed_with_its_reason(target: WarmTarget) -> None:
    large = entry(kernel(shared=106496), OTHER)
    failed = Record(kernel="_fwd", module="engine.ops", error="PTXASError: no")
    answers = [
        answer("large", large),
        answer("raised", message="ValueError: no"),
        answer("refused", records=[failed]),
        answer("elsewhere", entry(kernel(), KEY, "_bwd")),
    ]
    index, files = pack_entries(target, answers, {})
    reasons = {lack.case: lack.reason for lack in index.missing}
    assert "106496" in reasons["large"]
    assert reasons["raised"] == "ValueError: no"
    assert reasons["refused"] == "PTXASError: no"
    assert reasons["elsewhere"] == "the case does not reach it"
    assert [*index.entries] == [KEY]
    assert not [path for path in files if OTHER in path]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("entries", [1, 0])
def test_a_variant_that_does_not_compile_is_listed_beside_one_that_does(
    order: int, entries: int, target: WarmTarget
) -> None:
    good = Record(kernel="_fwd", module="engine.ops", shared_bytes=1)
    failed = good.model_copy(update={"shared_bytes": None, "error": "PTXASError: no"})
    made = [entry(kernel())][:entries]
    index, _ = pack_entries(target, [answer("two", *made, records=[good, failed][::order])], {})
    assert [lack.reason for lack in index.missing] == ["PTXASError: no"]
    assert [*index.entries] == [KEY][:entries]


def test_what_a_tuner_passes_over_is_not_missing(target: WarmTarget) -> None:
    good = Record(kernel="_fwd", module="engine.ops", shared_bytes=1, group="g")
    failed = good.model_copy(update={"shared_bytes": None, "error": "PTXASError: no"})
    tried = answer("tuned", entry(kernel()), records=[failed, good])
    assert not pack_entries(target, [tried], {})[0].missing
    # of another choice that the same call makes, nothing compiles
    other = failed.model_copy(update={"group": "h"})
    tried = answer("tuned", entry(kernel()), records=[failed, good, other])
    assert len(pack_entries(target, [tried], {})[0].missing) == 1


@pytest.mark.parametrize(
    ("ended", "error", "may_pass"),
    [
        ("raised", "PTXASError: `ptxas` failed with error code -9", True),
        ("called", "CalledProcessError: Command '['gcc']' died with <Signals.SIGKILL: 9>.", True),
        ("raised", "OSError: [Errno 28] No space left on device", True),
        ("raised", "MemoryError: ", True),
        ("raised", None, True),
        ("raised", "PTXASError: `ptxas` failed with error code 255", False),
        ("raised", "CompilationError: at 3:1: OSError is no name", False),
        ("called", None, False),
    ],
)
def test_an_answer_is_kept_only_if_another_try_gives_it_too(
    ended: Any, error: str | None, may_pass: bool, target: WarmTarget
) -> None:
    case, _ = answer("a")
    records = [Record(kernel="_fwd", module="engine.ops", error=error)] if error else []
    target.keep(case, WarmAnswer(case="a", ended=ended, records=records))
    assert target.answer_path(case).exists() != may_pass


def test_what_a_tuner_tries_and_drops_by_its_size_is_there_so_that_nothing_compiles_it(
    target: WarmTarget,
) -> None:
    large, wrong = entry(kernel(shared=106496), OTHER), entry(kernel(arch=90), "C" * 52)
    index, files = pack_entries(target, [answer("tuned", large, entry(kernel()), wrong)], {})
    assert {key: each.too_large for key, each in index.entries.items()} == {
        KEY: "",
        OTHER: "needs 106496 bytes of shared memory, the card has 101376",
    }
    assert f"opt/warm/triton/{OTHER}/_fwd.cubin" in files
    assert "sm_90" in index.missing[0].reason
    # nothing that fits, in this case or of this kernel: the call itself fails on the card
    others = [answer("large", large), answer("fits", entry(kernel()))]
    mixed = [answer("mixed", large, entry(kernel(), KEY, "_bwd"))]
    for answers in (others, mixed):
        index, files = pack_entries(target, answers, {})
        assert [*index.entries] == [KEY]
        assert "106496" in {lack.case: lack.reason for lack in index.missing}[answers[0][0].name]


def test_a_compiler_that_is_not_the_same_twice_gives_no_layer(target: WarmTarget) -> None:
    other = {**kernel(), "_fwd.json": kernel(shared=1)["_fwd.json"]}
    with pytest.raises(NotReproducible, match="compiled for b it has other bytes than for a"):
        pack_entries(target, [answer("a", entry(kernel())), answer("b", entry(other))], {})


@pytest.mark.parametrize("key", ["../../etc", "a" * 52, "A", "", "A" * 300])
def test_an_entry_stays_in_its_folder(key: str, target: WarmTarget) -> None:
    with pytest.raises(StepFailed, match="is no entry of Triton's cache"):
        pack_entries(target, [answer("a", entry(kernel(), key))], {})
    hostile = entry({"../x.so": b"", "_fwd.so": b""})
    with pytest.raises(StepFailed, match="is no entry of Triton's cache"):
        pack_entries(target, [answer("a", hostile)], {})


@pytest.mark.parametrize("data", ["~~", "00000", "\u00e4"])
def test_files_that_cannot_be_unpacked_end_the_work(data: str, target: WarmTarget) -> None:
    broken = WarmEntry(key=KEY, kernel="_fwd", files={"_fwd.so": data})
    with pytest.raises(StepFailed, match="cannot be unpacked"):
        pack_entries(target, [answer("a", broken)], {})


def test_a_key_covers_case_card_variables_and_workers(target: WarmTarget) -> None:
    from dataclasses import replace

    case = make_case(name="a", kernels=["_fwd"])
    others = [
        replace(target, card=card_for("sm_90")),
        replace(target, base=f"sha256:{'3' * 64}"),
        replace(target, setup=EngineSetup(package="engine", bare=["engine"])),
    ]
    keys = {each.key(case) for each in (target, *others)}
    keys.add(target.key(case.model_copy(update={"function": ["engine.ops:g"]})))
    assert len(keys) == 5
    # these only say what a case is for
    assert target.key(case.model_copy(update={"kernels": ["g"]})) == target.key(case)


def test_a_worker_sees_fixed_paths_and_no_path_of_this_machine(
    target: WarmTarget, tmp_path: Path
) -> None:
    for name in ("job.json", "answers"):
        (tmp_path / name).touch()
    work = tmp_path / "work"
    work.mkdir()
    job, answers = tmp_path / "job.json", tmp_path / "answers"
    words = target.sandbox.command(
        target.environment.command(str(WARM_WORKER), str(job), str(answers)),
        read=[WARM_WORKER, job],
        write=[work, answers],
        root=tmp_path / "root",
        cwd=work,
    )
    *_, request, python, _, program, first, second = words
    assert python == "/usr/bin/python3.11"
    assert (program, first, second) == (
        "/warm-programs/inside",
        "/warm/job.json",
        "/warm/answers",
    )
    assert json.loads(request)["cwd"] == "/warm/work"
    assert {at for _, at in json.loads(request)["mounts"]} == {
        "/warm/work",
        "/warm/answers",
        "/warm/job.json",
    }
    shown = json.dumps([target.job([make_case(name="a")]), target.variables([], work)])
    assert str(tmp_path) not in shown
    assert "/home/engine" not in shown
    # the image's own flags are those that its kernels are compiled with
    assert target.variables([], work)["CUTE_DSL_ARCH"] == "sm_120a"
