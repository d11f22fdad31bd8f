"""Slim images: kernels that were compiled before are used where there is no compiler at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.app import warm
from pipeline.app.build import BuildRequest, build_images
from pipeline.app.warm import LibraryNeeds
from pipeline.app.workspace import Workspace
from pipeline.artifacts.containers.container_engine import find_backend
from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import StartFails
from pipeline.images.assemble.image import Built, assemble_images
from pipeline.images.assemble.locked_layers import make_layers
from pipeline.images.assemble.plan import ImagePlan, plan_image, work_for
from pipeline.images.gate.smem.engine import GateContext
from pipeline.images.gate.smem.image_gate import ImageGate, find_case, open_gate
from pipeline.images.spec.image import SlimSpec
from pipeline.images.start_test.prove import require_libraries
from pipeline.images.warm.layer import pack_entries
from pipeline.images.warm.target import open_warm
from tests.gpu.collect import gate_context
from tests.integration.test_warm_kernels import CASES, Proving, asked

AMD64 = "linux/amd64"


@pytest.fixture(scope="module")
def gate(big_store: Path) -> Iterator[ImageGate]:
    context = gate_context(open_store(big_store))
    with context.store.in_use():
        yield open_gate(context, plan_image(context.checkout, "sglang-k2", AMD64))


def paths_of(context: GateContext, plan: ImagePlan) -> set[str]:
    """What the locked layers of an image hold; they are made where the store lacks them."""
    work = work_for([plan], context.store)
    if work.missing:
        make_layers(context.store, work, context.make_fetcher(), keep_inputs=False)
    known = [context.store.layer(layer.key) for layer in plan.all_layers()]
    assert all(known)
    rows = [row for layer in known if layer for row in context.store.contents(layer)]
    return {row.path for row in rows if row.kind != "dir"}


@pytest.mark.big
def test_warm_kernels_are_called_where_all_that_slim_leaves_out_is_gone(gate: ImageGate) -> None:
    context = gate.context
    full, slim = (
        plan_image(context.checkout, name, AMD64)
        for name in ("sglang-k2-warm", "sglang-k2-warm-slim")
    )
    assert full.warm
    assert slim.warm
    assert full.base
    assert slim.base
    gone = paths_of(context, full.base) - paths_of(context, slim.base)
    assert {"usr/bin/gcc", "usr/bin/x86_64-linux-gnu-gcc-12", "usr/include/stdio.h"} <= gone
    assert any(path.endswith("/bin/nvcc") for path in gone)
    # with nvcc's own ptxas, and not Triton's
    assert not any("/triton/" in path or path.endswith(".so.13") for path in gone)
    cases = [find_case(gate.gates, name) for name in CASES]
    with open_warm(gate, full.warm) as target:
        answers = asked(target, cases)
        made = [(case, answers[case.name]) for case in cases]
        index, files = pack_entries(target, made, {})
    assert not index.missing
    with open_warm(gate, slim.warm) as target:
        root = Path(target.sandbox.system)  # type: ignore[attr-defined]
        for path, data in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        for path in gone:
            (root / path).unlink(missing_ok=True)
        assert not [
            *root.glob("usr/bin/*gcc*"),
            *root.glob("usr/bin/cc"),
            *root.glob("usr/include/*.h"),
        ]
        answers = asked(Proving(**vars(target)), cases)
    # WARM_ONLY: a kernel or a launcher that is no hit is an error
    assert {(a.ended, a.message) for a in answers.values()} == {("called", "")}
    used = {entry.key for answer in answers.values() for entry in answer.entries}
    assert used == {*index.entries}


def thinned(context: GateContext, *debs: str) -> Built:
    """The image debian-python without some of its packages, under no name."""
    whole = plan_image(context.checkout, "debian-python", AMD64)
    slim, layer = SlimSpec(debs=list(debs)), whole.layers[0]
    pins = tuple(pin for pin in layer.pins if pin.name not in debs)
    assert len(layer.pins) - len(pins) == len(debs)
    plan = replace(
        whole,
        spec=whole.spec.model_copy(update={"name": "thinned"}),
        layers=(replace(layer, pins=pins),),
        inputs={**whole.inputs, "slim": slim.model_dump()},
        slim=slim,
    )
    (built,) = assemble_images(
        context.checkout, context.store, [plan], context.make_fetcher, judge=False
    )
    return built


@pytest.fixture
def context(big_store: Path, tmp_path: Path) -> Iterator[GateContext]:
    """The big store's files, and a store of its own for what is made of them."""
    from pipeline.app.gate import make_gate_context

    root = Path(__file__).resolve().parents[2]
    made = make_gate_context(
        Workspace(root, open_store(tmp_path / "store").root), (str(big_store / "inputs"),)
    )
    with made.store.in_use():
        yield made


@pytest.mark.big
def test_what_the_shipped_images_leave_out_of_debian_nobody_links(context: GateContext) -> None:
    shipped = context.checkout.spec("sglang-k2-warm").slim
    assert shipped
    require_libraries(context.store, thinned(context, *shipped.debs), find_backend("auto"))


@pytest.mark.big
@pytest.mark.parametrize(
    ("package", "library"), [("libgmp10", r"libgmp\.so\.10"), ("libffi8", r"libffi\.so\.8")]
)
def test_a_library_that_somebody_links_is_missed(
    package: str, library: str, context: GateContext
) -> None:
    with pytest.raises(StartFails, match=library):
        require_libraries(context.store, thinned(context, package), find_backend("auto"))


@pytest.mark.big
def test_a_covered_image_is_built_with_the_real_checks_and_is_smaller(
    big_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped recipes are not covered yet, so the report stands in for one that is."""
    root, store = Path(__file__).resolve().parents[2], Store(big_store)
    plan = plan_image(Workspace(root).checkout(), "sglang-k2-warm-slim", AMD64)
    if plan.warm is None or store.layer(plan.warm.key) is None:
        pytest.skip("the store has no warm layer of sglang-k2-warm: `sm120 image warm` makes it")
    golden = (root / "lockfiles/golden.yaml").read_bytes()
    row = LibraryNeeds(recipe="any", library="Triton", state="present")
    monkeypatch.setattr(warm, "report_warm", lambda workspace, request: [row])
    try:
        request = BuildRequest(names=("sglang-k2-warm",), slim=True, accept=True)
        (built,) = build_images(Workspace(root, big_store), request).built
    finally:
        (root / "lockfiles/golden.yaml").write_bytes(golden)
    whole = store.image_record("sglang-k2", AMD64)
    assert whole
    warm_bytes = next(x for x in built.layers if "warm kernels" in x.title).record.size_bytes
    assert built.size_bytes - warm_bytes < whole.size_bytes - 150_000_000
