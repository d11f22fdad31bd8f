"""The options of `sm120 smoke` that say what the server is expected to do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from pipeline.cli.options import Numbers, all_of
from pipeline.recipe.model import Recipe
from pipeline.smoke.model import THINKING_TOKENS, SmokePlan, plan_for, quick

# Options that set one field of the plan.
_FIELDS = {
    "model": "model",
    "streams": "streams",
    "contexts": "contexts",
    "context_tokens": "context_tokens",
    "lengths": "lengths",
    "pressure": "pressure_prompts",
}


_OPTIONS = (
    click.option("--model", help="Name of the model [default: the first that the server has]."),
    click.option(
        "--no-quality",
        is_flag=True,
        help="Judge only what any sound server guarantees, for a model that cannot think.",
    ),
    click.option("--no-tools", is_flag=True, help="Expect no tool calls."),
    click.option("--reasoning", is_flag=True, help="Expect a model that thinks before it answers."),
    click.option("--vision", is_flag=True, help="Expect a model that sees pictures."),
    click.option("--text-only", is_flag=True, help="Leave pictures out, also if the model sees."),
    click.option("--quick", is_flag=True, help="Climb in small steps, for a slow machine."),
    click.option("--streams", type=Numbers(), help="Concurrent requests, such as 1,2,8,64."),
    click.option("--contexts", type=Numbers(), help="Prompt lengths to walk, in tokens."),
    click.option(
        "--context",
        "context_tokens",
        type=click.IntRange(256, 1 << 24),
        help="Context of the server [default: what it says].",
    ),
    click.option("--lengths", type=click.IntRange(1, 4096), help="Consecutive prompt lengths."),
    click.option(
        "--pressure",
        type=click.IntRange(1, 100_000),
        help="Texts that push others out of the KV cache.",
    ),
    click.option(
        "--request-limit-s",
        type=click.FloatRange(1),
        help="Seconds for one request; long prompts need more [default: 600].",
    ),
)
_NAMES = (
    *("no_quality", "no_tools", "reasoning", "vision", "text_only", "quick", "request_limit_s"),
    *_FIELDS,
)


@dataclass(frozen=True)
class PlanOptions:
    """What was typed; a recipe says the rest."""

    given: dict[str, Any]

    def plan(self, recipe: Recipe | None) -> SmokePlan:
        """What the server is held to."""
        base = plan_for(recipe) if recipe else SmokePlan()
        plan = SmokePlan.model_validate({**base.model_dump(), **self._changes(base)})
        return quick(plan) if self.given["quick"] else plan

    def _changes(self, base: SmokePlan) -> dict[str, Any]:
        given = self.given
        values: dict[str, Any] = {}
        if given["no_quality"]:
            values |= {"quality": False, "why_no_quality": "--no-quality"}
        if given["no_tools"]:
            values["tools"] = False
        if given["vision"]:
            values["vision"] = True
        if given["text_only"]:
            values["text_only"] = True
        if given["reasoning"]:
            values |= {"reasoning": True, "answer_tokens": THINKING_TOKENS}
        values |= {field: given[name] for name, field in _FIELDS.items() if given[name]}
        if given["contexts"]:
            # who names lengths expects them of the server as it is
            values["served_tokens"] = None
        if given["request_limit_s"]:
            values["limits"] = {**base.limits.model_dump(), "request_s": given["request_limit_s"]}
        return values


def plan_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command gets them as `plan_options`."""

    @all_of(_OPTIONS)
    @functools.wraps(command)
    def packed(*args: Any, **options: Any) -> Any:
        given = {name: options.pop(name) for name in _NAMES}
        return command(*args, plan_options=PlanOptions(given), **options)

    return packed
