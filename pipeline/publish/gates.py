"""Whether an image may be published: what its gates said of these very bytes."""

from __future__ import annotations

from typing import Any, Literal

from pipeline import foreign_json
from pipeline.assemble.image import Built
from pipeline.errors import PublishRefused, StoreDamaged
from pipeline.model import Frozen
from pipeline.spec.image import ImageSpec
from pipeline.store.store import Store, read_own

_GOOD = ("passed", "accepted")
_DEFAULT = "sm_120"
_MOST_BYTES = 64 << 20


class GateState(Frozen):
    """What is known of an image's gates."""

    platform: str
    state: Literal["passed", "no gates", "not passed"]
    message: str = ""


def gate_state(
    store: Store, spec: ImageSpec, built: Built, *, has_patches: bool | None = None
) -> GateState:
    """The kept record, if it is of this digest; every gate that the image asks for must pass.

    A series may be named and hold no patch: then there is none to be proved.
    """
    patched = bool(spec.patches) if has_patches is None else has_patches
    if not spec.gates:
        return GateState(platform=built.platform, state="no gates")
    path = store.image_folder(built.name, built.platform) / "gates.json"
    try:
        found = foreign_json.read_json(read_own(path), most_bytes=_MOST_BYTES)
        results = _results(found) if found["image_digest"] == built.digest else None
    except FileNotFoundError:
        return _not_passed(built, "its gates were not run")
    except (OSError, StoreDamaged, ValueError, KeyError, TypeError):
        return _not_passed(built, "the record of its gates is damaged")
    if results is None:
        return _not_passed(built, "its gates were run on another image")
    cards = _cards(spec)
    # what a gate says about a card that the image is not for decides nothing
    counted = [row for row in results if row[1] in (*cards, _DEFAULT)]
    wrong = [
        f"{gate} on {arch}: {verdict}" for gate, arch, verdict in counted if verdict not in _GOOD
    ]
    wrong += [f"{name}: not run" for name in _not_run(spec, cards, counted, patched)]
    if wrong:
        return _not_passed(built, "; ".join(wrong))
    message = "; ".join(f"{gate} on {arch}: {verdict}" for gate, arch, verdict in counted)
    return GateState(platform=built.platform, state="passed", message=message)


def _cards(spec: ImageSpec) -> list[str]:
    return (list(spec.cuda.architectures) if spec.cuda else []) or [_DEFAULT]


def _not_run(
    spec: ImageSpec, cards: list[str], found: list[tuple[str, str, str]], patched: bool
) -> list[str]:
    """Gates without a result; machine code is judged for every card the image promises."""
    judged, on = {row[0] for row in found}, {row[:2] for row in found}
    # patches are proved together with the shared-memory gate
    wanted = [*spec.gates, *(["patches"] if patched and "smem" in spec.gates else [])]
    missing = [gate for gate in wanted if gate not in judged]
    if "arch" in spec.gates and "arch" in judged:
        missing += [f"arch on {card}" for card in cards if ("arch", card) not in on]
    return missing


def _results(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Gate, card and verdict; the first format held the shared-memory gate alone."""
    if found["format"] == 1:
        return [("smem", str(found["card"]["arch"]), str(found["verdict"]))]
    return [(str(r["gate"]), str(r["arch"]), str(r["verdict"])) for r in found["results"]]


def _not_passed(built: Built, message: str) -> GateState:
    return GateState(platform=built.platform, state="not passed", message=message)


def require_gates(name: str, states: list[GateState], forced: str | None) -> None:
    """Refuse what did not pass, unless a reason was given."""
    bad = [s for s in states if s.state == "not passed"]
    if bad and not forced:
        raise PublishRefused(f"{name} for {bad[0].platform}: {bad[0].message}")
