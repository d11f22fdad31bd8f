"""Whether an image may be published: what its gates said of these very bytes."""

from __future__ import annotations

import json
from typing import Any, Literal

from pipeline.build.image import Built
from pipeline.errors import PublishRefused
from pipeline.model import Frozen
from pipeline.store.store import Store
from pipeline.wish.image import ImageWish

_GOOD = ("passed", "accepted")


class GateState(Frozen):
    """What is known of an image's gates."""

    platform: str
    state: Literal["passed", "no gates", "not passed"]
    words: str = ""


def gate_state(store: Store, wish: ImageWish, built: Built) -> GateState:
    """The kept record, if it is of this digest; every gate that the image wishes for must pass."""
    if not wish.gates:
        return GateState(platform=built.platform, state="no gates")
    path = store.image_folder(built.name, built.platform) / "gates.json"
    try:
        found = json.loads(path.read_bytes())
        results = _results(found) if found["image_digest"] == built.digest else None
    except FileNotFoundError:
        return _not_passed(built, "its gates were not run")
    except (OSError, ValueError, KeyError, TypeError):
        return _not_passed(built, "the record of its gates is damaged")
    if results is None:
        return _not_passed(built, "its gates were run on another image")
    wrong = [f"{g} on {arch}: {verdict}" for g, arch, verdict in results if verdict not in _GOOD]
    judged = {gate for gate, _, _ in results}
    wrong += [f"{gate}: not run" for gate in _wanted(wish) if gate not in judged]
    if wrong:
        return _not_passed(built, "; ".join(wrong))
    words = "; ".join(f"{g} on {arch}: {verdict}" for g, arch, verdict in results)
    return GateState(platform=built.platform, state="passed", words=words)


def _wanted(wish: ImageWish) -> list[str]:
    """Patches are proved by the shared-memory gate."""
    more = ["patches"] if wish.patches and "smem" in wish.gates else []
    return [*wish.gates, *more]


def _results(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Gate, card and verdict; the first format held the shared-memory gate alone."""
    if found["format"] == 1:
        return [("smem", str(found["card"]["arch"]), str(found["verdict"]))]
    return [(str(r["gate"]), str(r["arch"]), str(r["verdict"])) for r in found["results"]]


def _not_passed(built: Built, words: str) -> GateState:
    return GateState(platform=built.platform, state="not passed", words=words)


def require_gates(name: str, states: list[GateState], forced: str | None) -> None:
    """Refuse what did not pass, unless a reason was given."""
    bad = [s for s in states if s.state == "not passed"]
    if bad and not forced:
        raise PublishRefused(f"{name} for {bad[0].platform}: {bad[0].words}")
