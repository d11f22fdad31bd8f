"""What a reader must know before believing a trial, and what makes it count for nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pipeline.core import log
from pipeline.serving.bench import model
from pipeline.serving.bench.model import Mark, MarkKind, Metrics, RequestRow, Samples
from pipeline.serving.bench.self_test import USABLE_SHARE
from pipeline.serving.bench.workers import WorkerStats
from pipeline.serving.bench.workload import TextPrompts, Workload

_INPUT_TOLERANCE = 0.05  # of the asked length, on average
_CACHED_SHARE = 0.05  # templates and system texts are always cached
_COUNTED_SHARE = 0.02  # by which the engine's own counter may differ
_LATE_S = 0.05  # behind the schedule of a rate, at the 99th percentile
_TOGETHER_SHARE = 0.5  # beyond it, the median of ITL is 0
_BEHIND_S = 0.25  # the longest that a worker stood still
# Beside a read: the rate is kept this well, and yet one gap is so many times the mean one.
_KEPT, _BURST = 0.5, 10.0


class TrialChecks:
    """Looks at each request on its way to the disk."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._failures: Counter[str] = Counter()
        self._counts: Counter[MarkKind] = Counter()
        self._examples: dict[str, str] = {}
        self._requests = 0
        self._asked = self._input = self._cached = 0
        self._late: list[float] = []
        self._gaps = self._together = self._padded = 0

    def through(self, rows: Iterable[RequestRow]) -> Iterator[RequestRow]:
        """Yields the same rows."""
        for row in rows:
            yield row
            self._requests += 1
            if row.failure:
                self._failures[row.failure] += 1
                self._examples.setdefault(row.failure, row.message)
                continue
            if row.output_tokens is None:
                self._counts["usage-missing"] += 1
            elif row.tokens != row.output_tokens or row.cached != row.cached_tokens:
                self._counts["usage-disagrees"] += 1
            elif row.asked_output and row.output_tokens < row.asked_output:
                self._counts["short-answers"] += 1
            if row.part and row.output_tokens is not None:
                self._padded += row.chunks > row.output_tokens
            self._counts["retried"] += bool(row.retries)
            self._counts["looping"] += row.looping
            if row.asked_input and row.input_tokens is not None:
                self._asked += row.asked_input
                self._input += row.input_tokens
            self._cached += row.cached or 0
            self._gaps += len(row.gaps_us)
            self._together += row.gaps_us.count(0)
            if row.planned_s is not None:
                self._late.append(row.sent_s - row.planned_s)

    def failures(self) -> list[str]:
        """Requests without a whole answer, by kind."""
        return [
            f"{count} of {log.count(self._requests, 'request')} failed: {kind}:"
            f" {self._examples[kind]}"
            for kind, count in sorted(self._failures.items())
        ]

    def void(self, unsent: int) -> list[str]:
        """Why the trial counts for nothing."""
        reasons, looping = self.failures(), self._counts["looping"]
        if looping and self._workload.looping == "void":
            reasons.append(f"{looping} of {log.count(self._requests, 'answer')} with repeated text")
        if self._padded:
            of = f"{self._padded} of {log.count(self._requests, 'answer')}"
            reasons.append(f"{of} with more events than tokens, which may hide a pause")
        if unsent:
            reasons.append(f"not sent any more: {log.count(unsent, 'request')}")
        return reasons

    def marks(self) -> list[Mark]:
        """What else a reader must know."""
        of = f"of {log.count(self._requests, 'answer')}"
        texts: dict[MarkKind, str] = {
            "usage-missing": f"{of} without a token count: their events were counted",
            "usage-disagrees": f"{of} with a token count that cannot be true: events were counted",
            "short-answers": f"{of} with fewer tokens than were asked for",
            "retried": f"{of} refused at first",
            "looping": f"{of} with repeated text",
        }
        found = {k: f"{self._counts[k]} {text}" for k, text in texts.items() if self._counts[k]}
        if self._together > _TOGETHER_SHARE * self._gaps:
            share = f"{self._together / self._gaps:.0%} of the events"
            came = "came in one read with the event before: their ITL is 0"
            found["events-together"] = f"{share} {came}"
        off = self._input / self._asked - 1 if self._asked else 0.0
        if abs(off) > _INPUT_TOLERANCE:
            found["input-differs"] = f"prompts have {tokens_off(off)} than asked"
        prompts = self._workload.prompts
        is_fresh = isinstance(prompts, TextPrompts) and prompts.unique and not prompts.prefix_tokens
        cached = self._cached / self._input if self._input else 0.0
        if is_fresh and cached > _CACHED_SHARE:
            found["cache-hits"] = f"{cached:.0%} of the prompt tokens came from a cache"
        late = sorted(self._late)[int(0.99 * (len(self._late) - 1))] if self._late else 0.0
        if late > _LATE_S:
            found["behind-schedule"] = f"requests were sent up to {late:.2f} s late"
        return [Mark(kind=kind, message=message) for kind, message in found.items()]


def tokens_off(share: float) -> str:
    """A difference of lengths in words, such as `14 % fewer tokens`."""
    return f"{abs(share) * 100:.0f} % {'more' if share > 0 else 'fewer'} tokens"


def cell_marks(trials: Sequence[model.Trial]) -> list[str]:
    """The marks of a cell for people; those of trials that differ only by numbers become one."""
    same: dict[tuple[str, str], list[str]] = {}
    for mark in (mark for trial in trials for mark in trial.marks):
        same.setdefault((mark.kind, re.sub(r"[\d.,]+", "", mark.message)), []).append(mark.message)
    of = f"of {log.count(len(trials), 'trial')}, the first"
    return [
        f"{kind}: {messages[0]}"
        if len(trials) == 1
        else f"{kind} in {len(messages)} {of}: {messages[0]}"
        for (kind, _), messages in same.items()
    ]


def client_marks(
    test: model.SelfTest | None, efforts: Sequence[WorkerStats], output_tok_s: float = 0.0
) -> list[Mark]:
    """Whether the client was the limit."""
    message = "the client did not measure itself at this concurrency"
    marks = [] if test else [Mark(kind="client-unmeasured", message=message)]
    limits = []
    if test and not test.trusted:
        limits.append(f"at this concurrency {test.message}")
    if test and output_tok_s > test.ceiling_tok_s:
        limits.append(
            f"{output_tok_s:,.0f} tok/s is beyond the {test.ceiling_tok_s:,.0f} tok/s that the"
            " client reads surely: the server may be faster"
        )
    share = max((effort.share for effort in efforts), default=0.0)
    if share > USABLE_SHARE:
        limits.append(
            f"a worker used {share:.0%} of its core; up to {USABLE_SHARE:.0%} it is trusted"
        )
    behind = max((effort.behind_s for effort in efforts), default=0.0)
    if behind > _BEHIND_S:
        limits.append(f"a worker of the client did not run for {behind:.2f} s")
    return [*marks, *(Mark(kind="client-limited", message=message) for message in limits)]


def sample_marks(samples: Samples, metrics: Metrics) -> list[Mark]:
    """Cards that were slowed down, links that erred, and an engine that counted otherwise."""
    found: list[tuple[MarkKind, str]] = []
    for card in samples.gpus:
        of = f"GPU {card.index}:"
        if reasons := sorted({why for each in card.throttle for why in each}):
            times = f"{sum(map(bool, card.throttle))} of {len(card.at_s)} samples"
            found.append(("throttled", f"{of} {', '.join(reasons)} in {times}"))
        replays = [count for count in card.pcie_replays if count is not None]
        if replays and replays[-1] > replays[0]:
            found.append(("link-errors", f"{of} {replays[-1] - replays[0]} PCIe replays"))
        width = min((each for each in card.pcie_width if each is not None), default=None)
        if card.pcie_width_most and width is not None and width < card.pcie_width_most:
            found.append(("link-errors", f"{of} PCIe x{width} of x{card.pcie_width_most}"))
        # a card at rest lowers its own generation: the best one in a trial is that under load
        speed = max((each for each in card.pcie_generation if each is not None), default=None)
        if card.pcie_generation_most and speed is not None and speed < card.pcie_generation_most:
            found.append(("link-errors", f"{of} PCIe {speed}.0 of {card.pcie_generation_most}.0"))
    rate, pause = metrics.decode_under_load_tok_s, metrics.worst_pause_ms
    if rate and pause and (metrics.decode_kept or 0.0) > _KEPT:
        usual_ms = 1e3 * (metrics.tokens_per_chunk or 1.0) / rate
        if pause > _BURST * usual_ms:
            kept = f"{metrics.decode_kept:.0%} of the rate is kept beside a read"
            waited = f"yet a writer waited {pause:,.0f} ms, {pause / usual_ms:.0f} times as long as"
            found.append(("bursts", f"{kept}, {waited} usual: tokens came in bursts after pauses"))
    cached, repeated = metrics.cached_share, metrics.repeated_share
    if cached is not None and repeated is not None and cached > repeated + _CACHED_SHARE:
        beyond = f"{cached:.0%} of the prompt tokens cached by the server's count, and the trace"
        why = f"{beyond} repeats {repeated:.0%}: it counts wrong, or knows them from before"
        found.append(("cache-hits", why))
    counted = samples.engine.counters.get("generated_tokens") if samples.engine else None
    tokens = metrics.output_tokens
    # engines differ in whether the token that ends an answer counts
    allowed = max(_COUNTED_SHARE * tokens, metrics.requests)
    is_whole = tokens and not metrics.failed
    if is_whole and counted is not None and abs(counted - tokens) > allowed:
        off = f"{counted / tokens - 1:+.0%} output tokens: it serves others too, or counts wrong"
        found.append(("usage-disagrees", f"the engine counted {off}"))
    return [Mark(kind=kind, message=message) for kind, message in found]
