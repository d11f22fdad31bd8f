from __future__ import annotations

import pytest

from pipeline.artifacts.binary.fatbin import CUBIN, NVVM, PTX, CodeTarget
from pipeline.images.gate.arch import (
    Facts,
    ModuleFacts,
    ObjectVerdict,
    jits_on,
    judge_object,
    read_binary_facts,
    runs_on,
    target_of,
)
from tests.unit.binary.arch_files import DATA, opener


def facts(*modules: list[CodeTarget]) -> Facts:
    return Facts(reader="test", modules=[ModuleFacts(targets=tuple(m), times=1) for m in modules])


def sm(arch: int, suffix: str | None = "") -> CodeTarget:
    return CodeTarget(CUBIN, arch, suffix)


def compute(arch: int, suffix: str = "") -> CodeTarget:
    return CodeTarget(PTX, arch, suffix)


@pytest.mark.parametrize(
    ("target", "card"),
    [
        (sm(120), 120),
        (sm(120, "a"), 120),
        (sm(120, "f"), 120),
        (sm(120, None), 120),
        (sm(120), 121),
        (sm(120, "f"), 121),
        (sm(80), 89),
    ],
)
def test_machine_code_that_loads(target: CodeTarget, card: int) -> None:
    assert runs_on(target, card)


@pytest.mark.parametrize(
    ("target", "card"),
    [
        (sm(120, "a"), 121),
        (sm(120, None), 121),
        (sm(121), 120),
        (sm(121, "f"), 120),
        (sm(100), 120),
        (sm(100, "f"), 120),
        (sm(90), 120),
        (sm(90, "a"), 120),
        (sm(12), 120),
        (compute(120), 120),
        (CodeTarget(NVVM, 120, ""), 120),
    ],
)
def test_machine_code_that_does_not_load(target: CodeTarget, card: int) -> None:
    assert not runs_on(target, card)


@pytest.mark.parametrize(
    ("target", "card", "works"),
    [
        (compute(80), 120, True),
        (compute(120), 120, True),
        (compute(120), 121, True),
        (compute(120, "a"), 120, True),
        (compute(120, "f"), 121, True),
        (compute(121), 120, False),
        (compute(90, "a"), 120, False),
        (compute(100, "f"), 120, False),
        (compute(120, "a"), 121, False),
        (sm(120), 120, False),
        (CodeTarget(NVVM, 75, ""), 120, False),
    ],
)
def test_ptx_is_compiled_for_newer_cards_unless_it_is_a_variant(
    target: CodeTarget, card: int, works: bool
) -> None:
    assert jits_on(target, card) is works


@pytest.mark.parametrize(
    ("modules", "verdict"),
    [
        ([], ObjectVerdict.NO_CUDA_CODE),
        ([[sm(90, "a")]], ObjectVerdict.NO_KERNEL_IMAGE),
        ([[sm(90, "a"), sm(100, "f")], [compute(121)]], ObjectVerdict.NO_KERNEL_IMAGE),
        ([[CodeTarget(NVVM, 120, "")]], ObjectVerdict.NO_KERNEL_IMAGE),
        ([[sm(80), compute(80)]], ObjectVerdict.JIT),
        ([[sm(80), compute(80)], [sm(90)]], ObjectVerdict.JIT),
        ([[sm(90), sm(120)]], ObjectVerdict.RUNS),
        ([[sm(90)], [sm(120, "f")]], ObjectVerdict.RUNS),
    ],
)
def test_the_verdict_on_an_object(modules: list[list[CodeTarget]], verdict: ObjectVerdict) -> None:
    assert judge_object(facts(*modules), "sm_120").verdict is verdict


def test_modules_without_code_for_the_card_are_counted() -> None:
    result = judge_object(facts([sm(120)], [sm(90), compute(90)], [sm(90, "a")]), "sm_120")
    assert (result.running, result.jitted, result.modules) == (1, 1, 3)


def test_what_cannot_be_read_says_why_and_did_not_pass() -> None:
    result = judge_object(read_binary_facts(opener(b"not an object"), 13), "sm_120")
    assert result.verdict is ObjectVerdict.UNREADABLE
    assert result.message == "unreadable: neither an ELF file nor a fatbin"


@pytest.mark.parametrize(
    ("have", "want", "message"),
    [
        ([sm(120)], "sm_120a", "sm_120 where sm_120a is needed"),
        ([sm(120, "f")], "sm_120a", "sm_120f where sm_120a is needed"),
        ([sm(120, None)], "sm_120a", "sm_120 (a/f unknown) where sm_120a is needed"),
        ([sm(120)], "sm_120f", "sm_120 where sm_120f is needed"),
        ([compute(120)], "sm_120a", "nothing for this card where sm_120a is needed"),
        ([sm(90, "a"), sm(120)], "sm_120a", "sm_120 where sm_120a is needed"),
    ],
)
def test_the_wrong_variant_is_named(have: list[CodeTarget], want: str, message: str) -> None:
    result = judge_object(facts(have), "sm_120", want)
    assert (result.verdict, result.message) == (ObjectVerdict.WRONG_VARIANT, message)


def test_a_demand_on_an_object_without_cuda_code_is_not_met() -> None:
    result = judge_object(facts(), "sm_120", "sm_120a")
    assert result.verdict is ObjectVerdict.WRONG_VARIANT
    assert result.message == "no CUDA code where sm_120a is needed"


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (sm(120, "a"), "sm_120a"),
        (sm(120, "a"), "sm_120f"),
        (sm(120, "f"), "sm_120f"),
        (sm(120), "sm_120"),
        (sm(120, "f"), "sm_120"),
    ],
)
def test_a_demand_that_is_met(have: CodeTarget, want: str) -> None:
    assert judge_object(facts([have]), "sm_120", want).verdict is ObjectVerdict.RUNS


def test_a_demand_for_another_card_is_not_asked() -> None:
    assert judge_object(facts([sm(90)]), "sm_90", "sm_120a").verdict is ObjectVerdict.RUNS
    assert judge_object(facts([sm(120)]), "sm_121", "sm_120a").verdict is ObjectVerdict.RUNS


@pytest.mark.parametrize(
    ("have", "want", "verdict"),
    [
        (sm(120), "sm_120", ObjectVerdict.RUNS),
        (sm(120, "f"), "sm_120", ObjectVerdict.RUNS),
        (sm(121, "a"), "sm_120", ObjectVerdict.RUNS),
        (sm(120, "f"), "sm_120f", ObjectVerdict.RUNS),
        (sm(121, "a"), "sm_120f", ObjectVerdict.RUNS),
        (sm(120), "sm_120f", ObjectVerdict.WRONG_VARIANT),
        (sm(121), "sm_120f", ObjectVerdict.WRONG_VARIANT),
        (compute(120), "sm_120", ObjectVerdict.WRONG_VARIANT),
        (sm(120, "a"), "sm_120f", ObjectVerdict.NO_KERNEL_IMAGE),
    ],
)
def test_a_demand_of_the_family_counts_on_every_card_of_it(
    have: CodeTarget, want: str, verdict: ObjectVerdict
) -> None:
    assert judge_object(facts([have]), "sm_121", want).verdict is verdict


@pytest.mark.parametrize(
    ("name", "card", "verdict"),
    [
        ("mixed.so", "sm_120", ObjectVerdict.RUNS),
        ("mixed.so", "sm_121", ObjectVerdict.RUNS),
        ("mixed.so", "sm_100", ObjectVerdict.JIT),
        ("hopper.so", "sm_120", ObjectVerdict.NO_KERNEL_IMAGE),
        ("hopper.so", "sm_90", ObjectVerdict.RUNS),
        ("compute_120.fatbin", "sm_120", ObjectVerdict.JIT),
        ("compute_120.fatbin", "sm_90", ObjectVerdict.NO_KERNEL_IMAGE),
        ("sm_120a.cubin", "sm_121", ObjectVerdict.NO_KERNEL_IMAGE),
        ("plain.so", "sm_120", ObjectVerdict.NO_CUDA_CODE),
    ],
)
def test_compiled_files_on_real_cards(name: str, card: str, verdict: ObjectVerdict) -> None:
    data = (DATA / name).read_bytes()
    assert judge_object(read_binary_facts(opener(data), len(data)), card).verdict is verdict


@pytest.mark.parametrize("name", ["120", "sm120", "sm_1200", "compute_120", "sm_120x", ""])
def test_what_is_no_architecture_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="not an architecture"):
        target_of(name)
