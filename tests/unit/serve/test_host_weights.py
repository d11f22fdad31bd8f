from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

import pytest

from pipeline.core.errors import WeightsDamaged, WeightsUnknown
from pipeline.core.known import Unknown
from pipeline.hosts.fleet.remote import CommandResult
from pipeline.hosts.fleet.tunnel import Tunnel
from pipeline.serving.serve.weights import WeightsFolder, find_weights_on, tiny_weights
from tests.testbed.locked_set import make_set
from tests.unit.serve.near_tunnel import NearTunnel, said
from tests.unit.serve.recipes import recipe, two_cards

SEAL = "sha256:" + "1" * 64
PROGRAM = "/opt/sm120/venv/bin/sm120"


def verified(**changes: Any) -> CommandResult:
    row = {"name": "kimi", "lock": SEAL, "files": 3, "files_read": 0, "whole": True}
    row |= {"vouched_by": "the checkout", "root": "/models", **changes}
    return said(json.dumps({"whole": row["whole"], "sets": [row]}))


def found(tmp_path: Path, answer: CommandResult | None, *known: Any) -> WeightsFolder:
    answers = {f"{PROGRAM} --version": said("sm120 1"), PROGRAM: answer} if answer else {}
    tunnel = NearTunnel(answers)
    return find_weights_on(cast(Tunnel, tunnel), two_cards(), str(tmp_path), known)


def test_the_tiny_model_is_sent_and_lies_there_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny_weights(cast(Tunnel, NearTunnel()), recipe())
    data = (weights.folder / weights.file).read_bytes()
    assert weights.digest == "sha256:" + hashlib.sha256(data).hexdigest()
    assert weights.folder.is_relative_to(Path.home())
    assert [path.name for path in weights.folder.iterdir()] == ["tiny.gguf"]


def test_a_dry_run_sends_no_tiny_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    planned = tiny_weights(cast(Tunnel, NearTunnel()), recipe(), dry_run=True)
    assert not list(tmp_path.iterdir())
    assert planned == tiny_weights(cast(Tunnel, NearTunnel()), recipe())
    assert (planned.folder / planned.file).is_file()


def test_a_set_that_the_host_proved_by_our_lock_passes(tmp_path: Path) -> None:
    lock = make_set(tmp_path / "set", {"a": b"1"}, {}, name="kimi").lock
    weights = found(tmp_path, verified(lock=lock.seal, vouched_by=""), lock)
    assert weights.proof is not None
    assert (weights.proof.good, weights.digest) == (True, lock.seal)
    assert weights.proof.why == "3 files are as locked, 0 read just now"


def test_a_set_whose_lock_the_host_can_vouch_for_passes(tmp_path: Path) -> None:
    weights = found(tmp_path, verified())
    assert weights.proof is not None
    assert weights.proof.good is True


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (said(code=WeightsDamaged.exit_code, err="kimi: 1 file is not as locked"), "damaged"),
        (
            said(code=WeightsDamaged.exit_code, err='{"error": "X", "message": "1 changed"}'),
            "damaged there: 1 changed",
        ),
        (said(code=WeightsDamaged.exit_code, err='{"message": 1}'), 'there: {"message": 1}'),
        (verified(whole=False), "kimi is not whole there"),
    ],
)
def test_damage_there_fails(tmp_path: Path, answer: CommandResult, words: str) -> None:
    proof = found(tmp_path, answer).proof
    assert proof is not None
    assert proof.good is False
    assert words in proof.why


def test_another_lock_of_the_same_name_fails(tmp_path: Path) -> None:
    lock = make_set(tmp_path / "set", {"a": b"1"}, {}, name="kimi").lock
    proof = found(tmp_path, verified(), lock).proof
    assert proof is not None
    assert (proof.good, proof.why) == (False, "the host has another lock of kimi")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "no sm120 that could prove them"),
        (said(code=WeightsUnknown.exit_code, err="no lock is of these files"), "no lock"),
        (said(code=2, err="no such option"), "no such option"),
        (said("not JSON"), "cannot be read"),
        (said("{}"), "cannot be read"),
        (said('{"sets": []}'), "holds no locked set, the recipe is for kimi"),
        (verified(name="other"), "holds other, the recipe is for kimi"),
        (verified(vouched_by=""), "nothing vouches for the lock"),
    ],
)
def test_what_the_host_cannot_prove_is_unknown(
    tmp_path: Path, answer: CommandResult | None, words: str
) -> None:
    proof = found(tmp_path, answer).proof
    assert proof is not None
    assert isinstance(proof.good, Unknown)
    assert words in proof.good.unknown


def test_a_folder_or_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsUnknown, match=r"gpu1: .*is not a folder there"):
        found(tmp_path / "gone", None)
    body = {"repository": "o/m", "weights": "kimi", "file": "model.gguf", "name": "m"}
    wants = recipe(model=body)
    there = find_weights_on(cast(Tunnel, NearTunnel()), wants, str(tmp_path), ())
    assert there.proof is not None
    assert (there.proof.good, there.proof.why) == (False, f"model.gguf is not in {tmp_path}")


def test_a_host_without_python_says_so(tmp_path: Path) -> None:
    tunnel = NearTunnel({"python3": said(code=127, err="python3: not found")})
    with pytest.raises(WeightsUnknown, match="python3: not found"):
        find_weights_on(cast(Tunnel, tunnel), two_cards(), str(tmp_path), ())


def test_the_first_part_of_a_split_model_and_its_config_are_found(
    tmp_path: Path,
) -> None:
    snapshot = tmp_path / "models--o--m" / "snapshots" / ("1" * 40)
    (snapshot / "Q4").mkdir(parents=True)
    (snapshot / "Q4" / "m-00001-of-00002.gguf").touch()
    (snapshot / "Q4" / "m-00002-of-00002.gguf").touch()
    (snapshot / "config.json").write_text("{}")
    body = {"repository": "o/m", "weights": "kimi", "folder": "Q4", "name": "m"}
    wants = recipe(engine="ik-llama", model=body)
    there = find_weights_on(cast(Tunnel, NearTunnel()), wants, str(snapshot), ())
    assert there.file == "Q4/m-00001-of-00002.gguf"
    assert there.config == "{}"
