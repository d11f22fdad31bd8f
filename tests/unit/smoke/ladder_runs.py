"""Runs of a whole ladder in small steps, against servers in this process."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Sequence

from pipeline.core.net.wire import Address
from pipeline.serving.smoke.client import ChatClient, Unsound
from pipeline.serving.smoke.ladder import LADDER, run_ladder
from pipeline.serving.smoke.model import ChatLimits, SmokePlan, SmokeResult
from pipeline.serving.smoke.session import Baseline, Rung, SmokeSession, record_baseline
from tests.testbed.model_server import ModelServer, listening

PLAN = SmokePlan(
    streams=[1, 2, 8, 64],
    rounds=1,
    short_requests=32,
    lengths=8,
    questions=6,
    depths=[0.1, 0.5, 0.9],
    batch_tokens=600,
    prefix_tokens=600,
    pressure_prompts=8,
    answer_tokens=256,
    limits=ChatLimits(first_token_s=1.5, request_s=30.0),
)


def run_here(program: str) -> str:
    """Code of the test's own brain, in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(program, {})
        except SyntaxError as error:
            raise Unsound(str(error)) from error
    return out.getvalue()


def open_session(url: str, plan: SmokePlan) -> SmokeSession:
    return SmokeSession(ChatClient(Address.read(url), plan.limits), plan, run_here)


async def _ladder_result(
    server: ModelServer,
    plan: SmokePlan,
    baseline: Baseline | None,
    has_drafts: bool,
    rungs: Sequence[Rung],
) -> SmokeResult:
    async with listening(server) as url:
        session = open_session(url, plan)
        session.restart, session.baseline = server.restart, baseline
        session.start_drafting = server.start_drafting if has_drafts else None
        return await run_ladder(session, url, rungs, say=lambda _: None)


def ladder_result(
    server: ModelServer,
    plan: SmokePlan = PLAN,
    baseline: Baseline | None = None,
    *,
    has_drafts: bool = False,
    rungs: Sequence[Rung] = LADDER,
) -> SmokeResult:
    """The whole ladder, or some of its rungs."""
    return asyncio.run(_ladder_result(server, plan, baseline, has_drafts, rungs))


async def _recorded(server: ModelServer) -> Baseline:
    async with listening(server) as url:
        session = open_session(url, PLAN)
        session.model = "brain-1"
        return await record_baseline(session, url)


def recorded(server: ModelServer) -> Baseline:
    """What a trusted server answers."""
    return asyncio.run(_recorded(server))
