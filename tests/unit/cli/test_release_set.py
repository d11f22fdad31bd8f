"""The artefacts of a release are made by its own commands, and verify the moment they are made.

`python -m tests.released --add VERSION` runs this and keeps the set as a fixture.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.core.model import sha256_of
from pipeline.images.gate.evidence import Evidence, EvidenceRow, GateKind, keep_evidence
from pipeline.images.spec.checkout import Checkout
from tests.released import ARTEFACTS, NEW_RELEASE, RELEASED, verify_artefact, write_digests
from tests.testbed.locked_set import make_set
from tests.unit.audit.advisory_files import affected, record, write_records
from tests.unit.cli.live_recipe import LiveRecipe, live_recipe
from tests.unit.hosts.machines import blackwell, facts
from tests.unit.support import AMD64, Command

# read before the unit tests clear SM120_ from the environment
VERSION = os.environ.get(NEW_RELEASE)
SMALL_SMOKE = ("--quick", "--lengths", "4", "--pressure", "2")
SMALL_BENCH = (
    "--concurrency",
    "2",
    "--requests",
    "4",
    "--input-tokens",
    "60",
    "--output-tokens",
    "8",
)
GATES: tuple[GateKind, ...] = ("smem", "parsers")


@pytest.fixture
def world(
    checkout: Checkout, sm120: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[LiveRecipe]:
    # a receipt vouches only for files that are some ticks old
    monkeypatch.setattr("pipeline.weights.disk.receipt.CLOCK_TICK_NS", -(10**9))
    with live_recipe(sm120, monkeypatch, tmp_path, LiveRecipe) as made:
        yield made


def test_the_artefacts_of_this_version_are_made_and_valid(
    world: LiveRecipe, checkout: Checkout, sm120: Command, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    release.mkdir()

    def do(*words: str | Path) -> str:
        ended = sm120(*words)
        assert ended.code == 0, f"{words}: {ended.out}{ended.err}"
        return ended.out

    do("evidence", "new-key", "released")
    key = next(Path(os.environ["HOME"]).rglob("released.pem"))
    shutil.copy(key.with_suffix(".pub"), release)
    (release / "host").mkdir()
    host = facts(blackwell(2)).model_copy(update={"host": "n1"})
    (release / "host" / "n1.json").write_text(host.model_dump_json())
    do("host", "attest", release / "host" / "n1.json")
    small = {"config.json": b'{"model_type": "tiny"}\n', "empty.txt": b""}
    large = {"model.safetensors": b"weights" * 100}
    make_set(release / "weights", small, large, repository="org/brain", name="brain")
    do("weights", "verify", release / "weights")
    do("weights", "sign", release / "weights", "--key", key)
    # what gates found is written here: none of them runs a kernel of an image without an engine
    gates = []
    for gate in GATES:
        case = checkout.folder("tiny") / "gates" / f"{gate}.yaml"
        case.parent.mkdir(exist_ok=True)
        case.write_text("{}\n")
        rows = [EvidenceRow(name="case-1", verdict="passed")]
        inputs = {f"gates/{gate}.yaml": sha256_of(case.read_bytes())}
        made_by = {"triton": "3.5.1"}
        gates.append(
            Evidence(
                gate=gate,
                arch="sm_120",
                verdict="passed",
                inputs=inputs,
                made_by=made_by,
                rows=rows,
            )
        )
    keep_evidence(open_store(world.store), "tiny", AMD64, world.digest, gates)
    do("serve", "brainy", "--weights", release / "weights", "--skip-preflight", "flags")
    do("smoke", "brainy", *SMALL_SMOKE, "--output", release / "smoke")
    # a megabyte of questions and answers, which no verifier of the image asks for
    (release / "smoke" / "exchanges.jsonl").unlink()
    bench = ("bench", "brainy", *SMALL_BENCH, "--no-self-test", "--repeats", "1")
    do(*bench, "--host-facts", release / "host" / "n1.json", "--output", release / "bench")
    look = ("--look-in", release / "host", "--look-in", release / "weights")
    do("report", release / "bench" / "quick", "--output", release / "report.html", *look)
    given = record(aliases=["CVE-TEST-1"], affected=[affected(fixed="1.1")])
    database = write_records(tmp_path / "advisories", given)
    audit = ("evidence", "audit", "tiny", "--database", database, "--max-age", "36500")
    do(*audit, "--attest")
    do("image", "rebuild", "tiny", "--attest", "--offline", "--mirror", tmp_path / "mirror")
    do("image", "export", "tiny", release / "layout")
    # of the checkout what a verifier compares with
    for name in ("images", "lockfiles", "recipes"):
        shutil.copytree(tmp_path / name, release / "checkout" / name)
    found = {artefact: verify_artefact(sm120, release, artefact) for artefact in ARTEFACTS}
    assert {a: e.code for a, e in found.items() if e.code} == {}, found
    if VERSION:
        assert not (RELEASED / VERSION).exists(), "what a release signed is never made again"
        shutil.copytree(release, RELEASED / VERSION)
        write_digests(RELEASED)
