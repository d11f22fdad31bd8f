"""The same container again: what an engine keeps on disk stays, what it kept in memory is gone."""

from __future__ import annotations

import time

from pipeline import log
from pipeline.errors import StartFailed
from pipeline.serve.container_engine import ContainerEngine
from pipeline.serve.facts import ContainerFacts, require_own
from pipeline.serve.health import Door, is_healthy

_POLL_S = 0.3
STOP_S = 60  # engines let the requests that they work on finish


def restart(engine: ContainerEngine, facts: ContainerFacts, door: Door, timeout_s: float) -> None:
    """End the engine of a container, start it again and wait until it answers."""
    require_own(facts)
    with log.step(f"Restarting {facts.name}"):
        engine.stop(facts.id, STOP_S)
        if is_healthy(door):
            which = f"port {door}" if isinstance(door, int) else "its port"
            raise StartFailed(
                f"{facts.name}: was stopped, and {which} still answers",
                "Another server listens there: `ss -ltnp` names it."
                if facts.running
                else f"{engine.kind} does not know that it runs: `sm120 recipe stop` ends it.",
            )
        engine.start(facts.id)
        _wait(engine, facts, door, time.monotonic() + timeout_s)


def _wait(engine: ContainerEngine, before: ContainerFacts, door: Door, deadline: float) -> None:
    while not is_healthy(door):
        now = engine.container(before.id)
        if now is None or not now.running:
            how = f"ended ({now.exit_code})" if now else "is gone"
            raise StartFailed(
                f"{before.name}: {how} after a restart",
                f"`{engine.kind} logs {before.name}` shows why.",
            )
        if time.monotonic() > deadline:
            raise StartFailed(f"{before.name}: does not answer after a restart", "See its log.")
        time.sleep(_POLL_S)
