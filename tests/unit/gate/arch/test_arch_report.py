from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.store.store import Store, open_store
from pipeline.core.errors import StoreDamaged
from pipeline.images.gate import arch
from pipeline.images.gate.arch import (
    ArchReport,
    ArchSpec,
    ObjectVerdict,
    judge_image,
    read_arch_spec,
    read_image,
    reader_digest,
    runs_on,
    target_of,
)
from pipeline.images.spec.checkout import Checkout
from tests import makers
from tests.testbed.deb_file import Item, hard_link, symlink
from tests.unit.binary.arch_files import DATA
from tests.unit.support import ROOT, Command

PACKAGES = "opt/venv/lib/python3.11/site-packages"
HOPPER = f"{PACKAGES}/engine/hopper.so"
WHY = "an attention kernel for Hopper; nothing calls it on this card"

Parts = dict[str, bytes | makers.Part]


def compiled(*names: str) -> Parts:
    return {f"engine/{name}": (DATA / name).read_bytes() for name in names}


class Gate:
    """A checkout with one small image, and the gate on it."""

    def __init__(self, root: Path) -> None:
        self.root, self.mirror = root, root / "mirror"
        self.store: Store = open_store(root / "store")

    def make(self, parts: Parts, accepted: Any = None, items: Sequence[Item] = ()) -> None:
        wheel = makers.make_wheel(self.mirror, "engine", parts)
        deb = makers.make_deb(self.mirror, "tool", Item("./usr/bin/tool", b"#!/bin/sh\n"), *items)
        image = makers.wheel_image("engine", [wheel])
        if accepted is not None:
            image.files["gates/arch.yaml"] = json.dumps(accepted)
        self.checkout: Checkout = makers.make_checkout(
            self.root / "checkout", makers.root_image([deb]), image
        )
        self.built = makers.build(self.checkout, self.store, self.mirror, "engine")[0]

    def judge(self, spec: ArchSpec | None = None, card: str = "sm_120") -> ArchReport:
        return judge_image(read_image(self.store, self.built), spec or ArchSpec(), card)

    def verdicts(self) -> dict[str, ObjectVerdict]:
        result = {x.path.rpartition("/")[2]: x.judgement.verdict for x in self.judge().objects}
        return {name: verdict for name, verdict in result.items() if name in self.names}

    names = ("mixed.so", "hopper.so", "plain.so", "odd.so", "run", "script", "empty.so", "lib.so.1")


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


def test_every_object_of_an_image_gets_its_verdict(gate: Gate) -> None:
    gate.make(
        {
            **compiled("mixed.so", "hopper.so", "plain.so"),
            "engine/odd.so": b"not an object at all",
            "engine/empty.so": b"",
            "engine/run": makers.Part((DATA / "mixed.so").read_bytes(), mode=0o100755),
            "engine/script": makers.Part(b"#!/bin/sh\n", mode=0o100755),
        }
    )
    assert gate.verdicts() == {
        "mixed.so": ObjectVerdict.RUNS,
        "hopper.so": ObjectVerdict.NO_KERNEL_IMAGE,
        "plain.so": ObjectVerdict.NO_CUDA_CODE,
        "odd.so": ObjectVerdict.UNREADABLE,
        "empty.so": ObjectVerdict.UNREADABLE,
        "run": ObjectVerdict.RUNS,
    }


def test_an_object_stored_without_compression_is_read_too(gate: Gate) -> None:
    data = (DATA / "mixed.so").read_bytes() + bytes(3 << 20)
    gate.make({"engine/mixed.so": makers.Part(data, method=0)})
    assert gate.verdicts() == {"mixed.so": ObjectVerdict.RUNS}


def test_links_are_not_objects_but_a_hard_link_is_the_file_it_names(gate: Gate) -> None:
    items = (
        Item("./usr/lib/a.so", (DATA / "hopper.so").read_bytes()),
        hard_link("./usr/lib/b.so", "./usr/lib/a.so"),
        symlink("./usr/lib/nowhere.so", "/does/not/exist.so"),
        symlink("./usr/lib/round.so", "round.so"),
    )
    gate.make({}, items=items)
    result = {x.path: x.judgement.verdict for x in gate.judge().objects}
    assert result == {
        "usr/lib/a.so": ObjectVerdict.NO_KERNEL_IMAGE,
        "usr/lib/b.so": ObjectVerdict.NO_KERNEL_IMAGE,
    }


def test_a_second_look_reads_notes_and_no_layer(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.make(compiled("mixed.so", "hopper.so"))
    first = gate.judge()
    monkeypatch.setattr(
        arch, "read_binary_facts", lambda *_: pytest.fail("it read an object again")
    )
    assert gate.judge() == first


@pytest.mark.parametrize("note", [b"", b"{", b"[]", b'{"modules": [], "reader": "older"}'])
def test_a_damaged_or_older_note_is_made_again(gate: Gate, note: bytes) -> None:
    gate.make(compiled("hopper.so"))
    first = gate.judge()
    for path in (gate.store.root / "gates" / "arch").iterdir():
        path.write_bytes(note)
    assert gate.judge() == first
    kept = [json.loads(p.read_bytes()) for p in (gate.store.root / "gates" / "arch").iterdir()]
    assert {x["reader"] for x in kept} == {reader_digest()}


def test_a_damaged_layer_is_an_error_and_leaves_no_note(gate: Gate) -> None:
    gate.make(compiled("mixed.so"))
    records = [layer.record for layer in gate.built.layers]
    digest, row = next(
        (record.digest, row)
        for record in records
        for row in gate.store.contents(record)
        if row.path.endswith("mixed.so")
    )
    blob = gate.store.blob_path(digest)
    data = bytearray(blob.read_bytes())
    data[row.offset + 3000] ^= 0x55
    blob.write_bytes(data)
    with pytest.raises(StoreDamaged, match=r"mixed\.so"):
        gate.judge()
    assert not (gate.store.root / "gates" / "arch" / f"{row.sha256}.json").exists()


def test_an_accepted_object_does_not_fail_and_keeps_its_verdict(gate: Gate) -> None:
    gate.make(compiled("hopper.so"))
    assert [x.path for x in gate.judge().failures] == [HOPPER]
    report = gate.judge(ArchSpec(accepted={"*/engine/hopper.so": WHY}))
    assert report.passed
    assert report.summary["no kernel image"] == 1


def test_an_acceptance_that_nothing_needs_any_more_is_shown(gate: Gate) -> None:
    gate.make(compiled("mixed.so"))
    report = gate.judge(ArchSpec(accepted={"*/engine/mixed.so": WHY}))
    assert report.unused == ("*/engine/mixed.so",)


def test_acceptance_does_not_forgive_the_wrong_variant(gate: Gate) -> None:
    gate.make(compiled("mixed.so"))
    glob = "*/engine/mixed.so"
    report = gate.judge(ArchSpec(accepted={glob: WHY}, demands={glob: "sm_120a"}))
    assert [x.judgement.message for x in report.failures] == ["sm_120f where sm_120a is needed"]


def test_a_demand_that_no_object_answers_fails(gate: Gate) -> None:
    gate.make(compiled("mixed.so"))
    report = gate.judge(ArchSpec(demands={"*/engine/moved.so": "sm_120a"}))
    assert report.unmatched == ("*/engine/moved.so",)
    assert not report.passed


def test_for_a_card_that_was_not_promised_nothing_is_accepted(gate: Gate) -> None:
    gate.make(compiled("hopper.so"))
    spec = ArchSpec(accepted={"*/engine/hopper.so": WHY})
    objects = read_image(gate.store, gate.built)
    assert not judge_image(objects, spec, "sm_100", promised=False).passed


ENGINES = [(name, "linux/amd64") for name in ("sglang-k2", "sglang", "vllm", "vllm-b12x")]
SPARK = [(name, "linux/arm64") for name in ("sglang", "vllm")]


@pytest.mark.parametrize(("name", "platform"), [*ENGINES, *SPARK])
def test_the_shipped_files_are_valid_and_demand_code_for_their_card(
    name: str, platform: str
) -> None:
    checkout = Checkout(ROOT)
    spec = read_arch_spec(checkout, name, platform)
    (promised,) = checkout.spec(name).on(platform).promised_archs
    assert spec.accepted
    card = target_of(promised).arch
    assert any(runs_on(target_of(arch), card) for arch in spec.demands.values())


def gate_arch(sm120: Command, gate: Gate, *args: str) -> Any:
    sm120.cwd = gate.checkout.root
    return sm120("--store", gate.store.root, "gate", "run", "engine", "--only", "arch", *args)


def test_the_command_prints_a_table_and_ends_well(sm120: Command, gate: Gate) -> None:
    gate.make(
        compiled("mixed.so", "hopper.so", "plain.so"), {"accepted": {"*/engine/hopper.so": WHY}}
    )
    ended = gate_arch(sm120, gate)
    assert ended.code == 0, ended.err
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert "engine/hopper.so 90a – 0 of 1 no kernel image, accepted" in lines
    assert "engine/mixed.so 90a 120f 80 1 of 1 runs" in lines
    assert f"accepted: */engine/hopper.so: {WHY}" in lines
    assert any(line.startswith("engine on sm_120: 1 no kernel image, 1 runs") for line in lines)


def test_the_command_fails_with_its_own_code_and_names_the_object(
    sm120: Command, gate: Gate
) -> None:
    gate.make(compiled("hopper.so"))
    ended = gate_arch(sm120, gate)
    assert ended.error == "NoKernelImage"
    assert "1 object fails on sm_120" in ended.err
    assert "hopper.so: no kernel image" in ended.err


def test_the_command_answers_for_another_card_and_as_json(sm120: Command, gate: Gate) -> None:
    gate.make(compiled("hopper.so"))
    report = gate_arch(sm120, gate, "--arch", "sm_90", "--json").json["arch"]["reports"][0]
    (row,) = report["rows"]
    assert (report["arch"], report["verdict"], row["name"]) == ("sm_90", "passed", HOPPER)
    assert row["facts"]["code"] == ["sm_90a"]
    assert row["facts"]["modules"] == {"all": 1, "run": 1, "jit": 0}


@pytest.mark.parametrize("card", ["120", "sm_12x", "../..", "sm_120; rm"])
def test_the_command_refuses_what_is_no_card(sm120: Command, gate: Gate, card: str) -> None:
    gate.make(compiled("plain.so"))
    assert gate_arch(sm120, gate, "--arch", card).code == 2


@pytest.mark.parametrize(
    "text",
    [
        {"accepted": {"*": WHY}},
        {"accepted": {"*/engine/hopper.so": "short"}},
        {"accepted": {"*/engine/hopper.so": None}},
        {"demands": {"*/engine/hopper.so": "sm_120x"}},
        {"demands": {"*/engine/hopper.so": "latest"}},
        {"forgiven": {}},
        [],
    ],
)
def test_a_bad_arch_yaml_stops_the_command(sm120: Command, gate: Gate, text: Any) -> None:
    gate.make(compiled("plain.so"), text)
    assert gate_arch(sm120, gate).error == "SpecInvalid"
