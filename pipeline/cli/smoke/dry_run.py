"""`sm120 smoke --dry-run`: which checks a climb would make, without asking anybody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import click

from pipeline import log
from pipeline.cli.context import say_json
from pipeline.cli.recipe.recipes import all_overrides
from pipeline.recipe.launch import Overrides, speculates
from pipeline.recipe.model import Recipe
from pipeline.smoke.baseline import Baseline
from pipeline.smoke.ladder import why_skipped
from pipeline.smoke.rungs.length import UNKNOWN_CONTEXT
from pipeline.smoke.rungs.pictures import UNSEEN
from pipeline.smoke.session import CheckSpec, Rung, Session

# What only a server can say, by what a climb says where it does not.
_DEPENDS = {
    UNKNOWN_CONTEXT: "on the context that the server names",
    UNSEEN: "on whether the server says that its model sees",
}


class _Planned(NamedTuple):
    plan: str  # asked, skipped or depends
    rung: str
    check: str
    why: str


def foresee(session: Session, recipe: Recipe, *, may_restart: bool) -> None:
    """What a climb may do to the server of a recipe, as the recipe alone says it."""
    name = recipe.name
    if not may_restart:
        return leave_running(session)
    session.restart = _never
    session.why_no_drafting = f"{name}: has no draft model"
    if speculates(recipe, all_overrides(recipe, Overrides())):
        session.start_drafting, session.is_drafting = _never, True
        # a climb records one before it turns the draft model on
        session.baseline = session.baseline or Baseline(model="", url="", answers=[])
    elif recipe.speculation:
        session.why_no_drafting = f"{name}: only where it was served with its draft model"


def leave_running(session: Session) -> None:
    """Nothing is restarted, also not with a draft model: people may be using the server."""
    session.why_no_restart = session.why_no_drafting = "only with --restart"


async def _never() -> None:
    raise AssertionError("a dry run does nothing to a server")


def show_ladder(
    target: str, session: Session, rungs: Sequence[Rung], notes: Sequence[str], as_json: bool
) -> None:
    """Every check of the rungs; nobody is asked, nothing is started or written."""
    # of a climb the second check finds it out
    session.context_tokens = session.plan.context_tokens
    rows = [_planned(session, rung, check) for rung in rungs for check in rung.checks(session)]
    if as_json:
        plan = session.plan.model_dump(mode="json")
        checks = [row._asdict() for row in rows]
        return say_json({"target": target, "checks": checks, "sizes": plan, "dry_run": True})
    click.echo(log.table(["plan", "rung", "check", "why"], [[*r[:3], r.why or None] for r in rows]))
    click.echo(
        "\n" + "\n".join([*notes, f"Nothing was asked of {target}, and nothing was written"])
    )


def _planned(session: Session, rung: Rung, check: CheckSpec) -> _Planned:
    why = why_skipped(session, check)
    if why in _DEPENDS:
        return _Planned("depends", rung.name, check.name, _DEPENDS[why])
    return _Planned("skipped" if why else "asked", rung.name, check.name, why)
