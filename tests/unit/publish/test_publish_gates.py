from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.artifacts.store.store import Store
from pipeline.core.errors import PublishRefused
from pipeline.images.gate.state import gate_state, require_gates
from pipeline.images.spec.image import ImageSpec
from tests.makers import built_image
from tests.unit.support import tiny_spec

DIGEST, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64
BUILT = built_image("tiny", "linux/amd64", DIGEST)


def spec(*gates: str, **more: Any) -> ImageSpec:
    return ImageSpec.model_validate(tiny_spec(gates=list(gates), **more))


def keep(store: Store, record: Any) -> None:
    path = store.image_folder("tiny", "linux/amd64") / "gates.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(record if isinstance(record, str) else json.dumps(record))


def record(digest: str = DIGEST, **verdicts: str) -> dict[str, Any]:
    return {
        "image": "tiny",
        "platform": "linux/amd64",
        "image_digest": digest,
        "results": [result(gate, "sm_120", verdict) for gate, verdict in verdicts.items()],
    }


def result(gate: str, card: str, verdict: str) -> dict[str, Any]:
    return {"gate": gate, "arch": card, "verdict": verdict, "inputs": {}, "made_by": {}}


def test_an_image_without_gates_says_so_and_may_go(store: Store) -> None:
    state = gate_state(store, spec(), BUILT)
    assert state.state == "no gates"
    require_gates("tiny", [state], None)


@pytest.mark.parametrize("verdict", ["passed", "accepted"])
def test_passed_gates_let_an_image_go(store: Store, verdict: str) -> None:
    keep(store, record(smem=verdict, arch="passed"))
    state = gate_state(store, spec("smem", "arch"), BUILT)
    assert state.state == "passed"
    require_gates("tiny", [state], None)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (None, "not run"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ("{}", "damaged"),
        (record(OTHER, smem="passed", arch="passed"), "another image"),
        (record(), "smem on sm_120: not run"),
        (record(smem="passed"), "arch on sm_120: not run"),
        (record(smem="failed", arch="passed"), "smem on sm_120: failed"),
        (record(smem="passed", arch="unknown"), "arch on sm_120: unknown"),
        (record(smem="PASSED", arch="passed"), "damaged"),
        ({"format": 2, "image_digest": DIGEST}, "damaged"),
        ({**record(), "results": [{"gate": "smem"}]}, "damaged"),
        ({**record(smem="passed", arch="passed"), "format": 1}, "damaged"),
    ],
)
def test_anything_else_does_not(store: Store, kept: Any, message: str) -> None:
    if kept is not None:
        keep(store, kept)
    state = gate_state(store, spec("smem", "arch"), BUILT)
    assert state.state == "not passed"
    assert message in state.message
    with pytest.raises(PublishRefused, match="tiny for linux/amd64"):
        require_gates("tiny", [state], None)
    require_gates("tiny", [state], "a reason")


def test_patches_must_have_been_proved(store: Store) -> None:
    patched = spec("smem", patches="patches/series.yaml")
    keep(store, record(smem="passed"))
    assert gate_state(store, patched, BUILT).message == "patches on sm_120: not run"
    keep(store, record(smem="passed", patches="passed"))
    assert gate_state(store, patched, BUILT).state == "passed"


def test_machine_code_must_have_been_judged_for_every_card_that_is_promised(store: Store) -> None:
    cuda = {"from": ["nvidia"], "architectures": ["sm_120", "sm_121"]}
    both = spec("arch", cuda=cuda)
    keep(store, record(arch="passed"))
    assert gate_state(store, both, BUILT).message == "arch on sm_121: not run"


def test_a_card_that_the_image_is_not_for_decides_nothing(store: Store) -> None:
    kept = record(arch="passed")
    kept["results"].append(result("arch", "sm_90", "failed"))
    keep(store, kept)
    assert gate_state(store, spec("arch"), BUILT).state == "passed"


def test_results_for_sm_120_say_nothing_of_an_image_for_another_card(store: Store) -> None:
    spark = spec("arch", cuda={"from": ["nvidia"], "architectures": ["sm_121"]})
    keep(store, record(arch="passed"))
    assert gate_state(store, spark, BUILT).message == "arch on sm_121: not run"
    kept = record(arch="failed")
    kept["results"].append(result("arch", "sm_121", "passed"))
    keep(store, kept)
    assert gate_state(store, spark, BUILT).state == "passed"


def test_kernels_are_judged_for_the_card_whose_variant_is_promised(store: Store) -> None:
    keep(store, record(smem="passed"))
    promised = {"from": ["nvidia"], "architectures": ["sm_120a"]}
    assert gate_state(store, spec("smem", cuda=promised), BUILT).state == "passed"


def test_wrong_numbers_keep_an_image_back(store: Store) -> None:
    keep(store, record(smem="passed", numerics="passed"))
    assert gate_state(store, spec("smem"), BUILT).state == "passed"
    assert gate_state(store, spec("smem", "numerics"), BUILT).state == "passed"
    for verdict in ("failed", "unknown"):
        keep(store, record(smem="passed", numerics=verdict))
        assert gate_state(store, spec("smem"), BUILT).message == f"numerics on sm_120: {verdict}"


def test_a_series_without_patches_has_none_to_prove(store: Store) -> None:
    named = spec("smem", patches="patches/series.yaml")
    keep(store, record(smem="passed"))
    assert gate_state(store, named, BUILT, has_patches=False).state == "passed"
    assert gate_state(store, named, BUILT, has_patches=True).state == "not passed"
