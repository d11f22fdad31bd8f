from __future__ import annotations

import pytest

from pipeline.artifacts.binary.fatbin import CUBIN, PTX, CodeTarget
from pipeline.artifacts.binary.modules import broken_promise

SM_120, SM_120A = CodeTarget(CUBIN, 120, ""), CodeTarget(CUBIN, 120, "a")
SM_90, PTX_120 = CodeTarget(CUBIN, 90, ""), CodeTarget(PTX, 120, "")
UNKNOWN = CodeTarget(CUBIN, 120, None)


@pytest.mark.parametrize(
    ("modules", "promised"),
    [
        ([], []),
        ([], ["sm_120"]),  # a library without kernels, beside one that has them
        ([(SM_120,), (SM_120,)], ["sm_120"]),
        ([(SM_120, PTX_120)], ["sm_120"]),
        ([(SM_120, SM_90)], ["sm_90", "sm_120"]),
        ([(SM_120A,)], ["sm_120a"]),
    ],
)
def test_exactly_what_was_promised_is_in_order(
    modules: list[tuple[CodeTarget, ...]], promised: list[str]
) -> None:
    assert broken_promise(modules, promised) == ""


@pytest.mark.parametrize(
    ("modules", "promised", "message"),
    [
        ([(SM_90,)], ["sm_120"], "holds sm_90 where exactly sm_120"),
        ([(SM_120,), (SM_90,)], ["sm_120"], "holds sm_90 where"),
        ([(SM_120, SM_90)], ["sm_120"], "holds sm_120, sm_90 where exactly sm_120"),
        ([(SM_120,)], ["sm_90", "sm_120"], "holds sm_120 where exactly sm_120, sm_90"),
        ([(SM_120,)], ["sm_120a"], "holds sm_120 where exactly sm_120a"),
        ([(SM_120A,)], ["sm_120"], "holds sm_120a where exactly sm_120"),
        ([(UNKNOWN,)], ["sm_120"], "a/f unknown"),
        ([(PTX_120,)], ["sm_120"], "holds compute_120 where exactly sm_120"),
        ([(PTX_120,)], [], "holds compute_120 where exactly no GPU code"),
        ([(SM_120,)], [], "holds sm_120 where exactly no GPU code"),
        ([()], ["sm_120"], "holds an empty module"),
        ([()], [], "holds an empty module"),
    ],
)
def test_anything_else_is_told(
    modules: list[tuple[CodeTarget, ...]], promised: list[str], message: str
) -> None:
    assert message in broken_promise(modules, promised)
