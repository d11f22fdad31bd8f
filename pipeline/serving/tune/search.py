"""Looks for a better configuration of a kernel, step by step, and says whether it is one.

From the engine's own choice it goes to the best neighbour, in which one size is a step larger or
smaller, as long as that is faster. It measures the last one again beside the engine's own, and
takes it only if the whole interval of confidence is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median

from pipeline.core import log
from pipeline.core.errors import StepFailed
from pipeline.core.model import Frozen
from pipeline.serving.bench.metrics import interval
from pipeline.serving.bench.model import Interval
from pipeline.serving.tune.trials import Config, Journal, TrialWorker, TuneTrial, measure

# The steps that a size can take; powers of two, as the kernel wants them.
STEPS: dict[str, tuple[int, ...]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128, 256),
    "GROUP_SIZE_M": (1, 8, 16, 32, 64),
    "num_warps": (2, 4, 8),
    "num_stages": (2, 3, 4, 5),
}
# What Triton takes where a launch does not say (triton/backends/nvidia/compiler.py).
_TRITON = {"num_warps": 4, "num_stages": 3}
_QUICK_REPEATS, REPEATS = 5, 30
# Faster by less than this is no reason for another step, or for a table.
_STEP, _GAIN = 0.01, 0.01
_LEAST_RATIO = 1e-6

Judge = Callable[[Sequence[Config]], list[Config]]


class TunedTokens(Frozen):
    """What was found for one number of tokens."""

    tokens: int
    default: Config
    config: Config  # the default, where nothing is faster
    default_us: float
    us: float
    ratio: Interval | None  # of the times, tuned to default; none where nothing is faster
    trials: int
    failed: int  # of the trials

    @property
    def is_faster(self) -> bool:
        return self.ratio is not None


def neighbours(config: Config) -> Iterator[Config]:
    """Configurations that differ in one size, by one step."""
    for name, steps in STEPS.items():
        value = config[name]
        below = [step for step in steps if step < value][-1:]
        above = [step for step in steps if step > value][:1]
        for step in (*below, *above):
            yield {**config, name: step}


def tune_tokens(
    worker: TrialWorker,
    journal: Journal,
    tokens: int,
    *,
    judge: Judge,
    seeds: Sequence[Config],
    most: int,
) -> TunedTokens:
    """The best configuration for a number of tokens; `seeds` did well for other numbers.

    It only tries what `judge` lets pass. With `most` 0 it tries nothing, and takes what an
    earlier run found.
    """
    first = measure(worker, journal, tokens, None, _QUICK_REPEATS)
    if first.refused or not first.default:
        # without it there is nothing to compare with
        raise StepFailed(
            f"the engine's own choice for {log.count(tokens, 'token')} was not timed:"
            f" {first.refused or 'it named none'}",
            "`sm120 gate run` judges it without a card; `sm120 doctor` knows what drivers say. Then"
            " run this again: all trials so far are kept.",
        )
    own = {**_TRITON, **{k: v for k, v in first.default.items() if k in STEPS}}
    own.setdefault("GROUP_SIZE_M", 1)
    tried: dict[tuple[tuple[str, int], ...], TuneTrial] = {}
    best, best_ratio, more = own, 1.0, [*seeds]

    def key(config: Config) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(config.items()))

    if not most:
        best = next(reversed(journal.measured(tokens, REPEATS)), own)
    while len(tried) < most:
        asked = {key(c): c for c in (*more, *neighbours(best)) if key(c) not in tried and c != own}
        passed, more = judge([*asked.values()])[: most - len(tried)], []
        for config in passed:
            tried[key(config)] = measure(
                worker, journal, tokens, config, _QUICK_REPEATS, may_fail=True
            )
        good = {k: median(tried[k].ratios) for k in map(key, passed) if not tried[k].refused}
        if not good or min(good.values()) > best_ratio * (1 - _STEP):
            break
        fastest = min(good, key=lambda each: good[each])
        best, best_ratio = dict(fastest), good[fastest]
    ratio, chosen, times = None, first.default, first
    if best is not own:
        last = measure(worker, journal, tokens, best, REPEATS)
        if last.refused:
            raise StepFailed(
                f"the best choice for {log.count(tokens, 'token')} ran, and failed when it was"
                f" measured again: {last.refused}",
                "Run this again: all trials but this one are kept.",
            )
        found = interval(last.ratios)
        if found.low is not None and found.high is not None and found.high < 1 - _GAIN:
            # an outlier widens the interval beyond what times can be
            ratio = found.model_copy(update={"low": max(found.low, _LEAST_RATIO)})
            chosen, times = best, last
    return TunedTokens(
        tokens=tokens,
        default=first.default,
        config=chosen,
        default_us=fmean(times.default_us),
        us=fmean(times.tried_us if ratio else times.default_us),
        ratio=ratio,
        trials=len(tried),
        failed=sum(bool(trial.refused) for trial in tried.values()),
    )
