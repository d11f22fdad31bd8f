"""The plan of a run of the ladder, and its result: closed values that go into evidence."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from pipeline.core.model import FILE_VERSION, Count, Frozen, Stamp
from pipeline.core.verdict import LadderVerdict
from pipeline.serving.recipe.launch import context_of
from pipeline.serving.recipe.model import Recipe, SmokeSpec

# `quality` needs a model that can think; `mechanics` is what any sound server guarantees.
Kind: TypeAlias = Literal["quality", "mechanics"]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
ANSWER_TOKENS = 1024
THINKING_TOKENS = 8192  # thinking takes tokens before the answer begins


class Tolerance(Frozen):
    """How far two greedy answers to one prompt may differ; printed with every result.

    Batches of another size add numbers in another order, so that tokens of (nearly) equal
    probability may swap: sgl-project/sglang#39068. Everything after such a token may differ.
    """

    tie_nats: float = 0.3  # the token taken instead was this close: never counted against a server
    near_nats: float = 1.0  # and this close: a near miss, of which few are allowed; beyond: drift
    near_share: Share = 0.05
    # answers that differ where the server gives no logprobs to judge it by
    unjudged_share: Share = 0.25
    # mean difference of a token's logprob from a trusted run's, over what both wrote alike; a
    # choice of ours: a quarter of a nat is a probability that is wrong by a quarter
    oracle_nats: float = 0.25

    def sentence(self) -> str:
        """For people."""
        return (
            f"a tie is within {self.tie_nats} nats; near misses (up to {self.near_nats}) may be"
            f" {self.near_share:.0%} of the answers, drift none"
        )


class ChatLimits(Frozen):
    """Bounds of each request."""

    first_token_s: float = 60.0  # of a short prompt, without load
    request_s: float = 600.0
    most_bytes: int = 16 << 20


class SmokePlan(Frozen):
    """How far the ladder goes, and how large its steps are."""

    model: str | None = None  # none: the first that the server names
    quality: bool = True
    why_no_quality: str = ""
    tools: bool = True
    reasoning: bool = False
    vision: bool = False
    # left out of results that do not set it, so that older ones stay equal
    text_only: bool = Field(default=False, exclude_if=lambda value: not value)
    # the server keeps repeated prompts; left out of results like `text_only`
    caches: bool = Field(default=True, exclude_if=lambda value: value)
    streams: list[Positive] = [1, 2, 8, 16, 64, 128]
    rounds: Positive = 2
    short_requests: Positive = 96  # of a few tokens each, so that places are taken over in turn
    contexts: list[Positive] = []  # none: quarter, half and all of the server's
    walk_tokens: Positive | None = None  # and then no further than this
    # the context with which the recipe starts: a walk beyond it waits for a start with more
    served_tokens: Positive | None = Field(default=None, exclude_if=lambda value: value is None)
    depths: list[Share] = [0.05, 0.35, 0.65, 0.95]
    context_tokens: Positive | None = None  # none: what the server says
    lengths: Positive = 64
    questions: Positive = 12
    # vLLM and SGLang prefill 8192 tokens at once by default, llama.cpp 2048
    batch_tokens: Positive = 8192
    prefix_tokens: Positive = 4096
    pressure_prompts: Positive = 16
    answer_tokens: Positive = ANSWER_TOKENS
    stream_tokens: Positive = 160  # of each answer among many
    tolerance: Tolerance = Tolerance()
    limits: ChatLimits = ChatLimits()


class Check(Frozen):
    """One thing that a rung looked at."""

    name: str
    kind: Kind
    verdict: LadderVerdict
    message: str
    evidence: list[Count] = []  # numbers of the exchanges that it looked at


class RungResult(Frozen):
    """All checks of one rung."""

    name: str
    title: str
    verdict: LadderVerdict
    checks: list[Check]
    seconds: float
    message: str = ""


class SmokeResult(Frozen):
    """How far a server came."""

    format: Annotated[Literal["sm120-smoke/1"], FILE_VERSION] = "sm120-smoke/1"
    url: str
    model: str | None
    context_tokens: Count | None
    started: Stamp
    verdict: LadderVerdict
    rungs: list[RungResult]
    last_good: str | None
    exchanges: Count
    seconds: float
    plan: SmokePlan

    def failures(self) -> list[Check]:
        """Every check that failed."""
        return [c for rung in self.rungs for c in rung.checks if c.verdict == "failed"]


class Exchange(Frozen):
    """A request and its answer, as evidence keeps them: bounded, with the digest of the rest."""

    number: Count
    check: str
    method: str
    path: str
    request: str
    status: Count  # 0: there was no answer
    answer: str
    seconds: float
    first_s: float | None = None
    error: str = ""


def quick(plan: SmokePlan) -> SmokePlan:
    """The same rungs in small steps, for machines that compute a few hundred tokens a second."""
    answer_tokens = plan.answer_tokens
    if not plan.reasoning:
        answer_tokens = min(answer_tokens, 256 if plan.quality else 64)
    small = {
        "walk_tokens": 1024,
        "depths": [0.1, 0.9],
        "lengths": min(plan.lengths, 16),
        "short_requests": min(plan.short_requests, 48),
        "batch_tokens": min(plan.batch_tokens, 512),
        "prefix_tokens": min(plan.prefix_tokens, 384),
        "pressure_prompts": min(plan.pressure_prompts, 8),
        "answer_tokens": answer_tokens,
        # a model that can only recite never ends by itself
        "stream_tokens": plan.stream_tokens if plan.quality else 32,
    }
    return plan.model_copy(update=small)


def plan_for(recipe: Recipe) -> SmokePlan:
    """What a recipe expects of its server."""
    spec: SmokeSpec = recipe.smoke
    tiny = "the model is declared tiny: it can only recite" if recipe.model.tiny else ""
    plan = SmokePlan(
        model=recipe.model.name,
        quality=not recipe.model.tiny,
        why_no_quality=tiny,
        tools=spec.tools,
        reasoning=spec.reasoning,
        vision=spec.vision,
        streams=spec.streams,
        contexts=spec.contexts,
        served_tokens=context_of(recipe),
        answer_tokens=THINKING_TOKENS if spec.reasoning else ANSWER_TOKENS,
    )
    return quick(plan) if recipe.model.tiny else plan
