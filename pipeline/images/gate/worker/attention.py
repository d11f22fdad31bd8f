"""Attention from its definition, in float64: what every attention kernel is compared with.

Softmax of the scaled scores over the keys a query may see, times the values. No blocks, no online
softmax, no strides: nothing here is taken from an engine's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

# Rows of scores that are in memory at once; a long prompt's would not fit a card.
CHUNK = 1024


class Expected(NamedTuple):
    """The right result, and the sum of magnitudes that rounding errors of it are measured by."""

    want: Any
    size: Any
    weight: Any = (
        None  # attention only: the logarithm of the sum of exponentials, by query and head
    )


class Keys(NamedTuple):
    """Some keys and values, and the queries as they are multiplied with these keys.

    `q` is [queries, heads, d], `k` [keys, kv heads, d], `v` [keys, kv heads, dv]. `allowed` is
    [queries, keys], true where the query may see the key; none where it may see all.
    """

    q: Any
    k: Any
    v: Any
    allowed: Any = None


def attend(
    parts: Sequence[Keys], scale: float, cap: float | None = 0.0, sinks: Any = None
) -> Expected:
    """One sequence's attention over all parts' keys together.

    `cap` bounds every score as Gemma does it, cap * tanh(score / cap). `sinks` has a number for
    each head, the score of a key without a value: it takes its share and adds nothing.
    """
    import torch

    first = parts[0]
    queries, heads = first.q.shape[:2]
    shape = (queries, heads, first.v.shape[-1])
    want = torch.zeros(shape, dtype=torch.float64, device=first.q.device)
    size = torch.zeros_like(want)
    weight = torch.zeros(shape[:2], dtype=torch.float64, device=first.q.device)
    for head in range(heads):
        values = torch.cat([part.v[:, _kv_head(part, head)].double() for part in parts])
        for start in range(0, queries, CHUNK):
            rows = slice(start, start + CHUNK)
            scores = torch.cat([_scores(part, head, rows, scale, cap) for part in parts], dim=1)
            if sinks is not None:
                sink = sinks[head].double().expand(len(scores), 1)
                shares = torch.softmax(torch.cat([scores, sink], dim=1), dim=1)[:, :-1]
            else:
                shares = torch.softmax(scores, dim=1)
            want[rows, head] = shares @ values
            size[rows, head] = shares @ values.abs()
            weight[rows, head] = torch.logsumexp(scores, dim=1)
    return Expected(want, size, weight)


def together(results: Sequence[Expected]) -> Expected:
    """Several sequences' results, one after the other."""
    import torch

    return Expected(*(torch.cat(values) for values in zip(*results, strict=True)))


def _kv_head(part: Keys, head: int) -> int:
    # grouped-query attention: neighbouring heads share one head of keys
    return int(head // (part.q.shape[1] // part.k.shape[1]))


def _scores(part: Keys, head: int, rows: slice, scale: float, cap: float | None) -> Any:
    scores = part.q[rows, head].double() @ part.k[:, _kv_head(part, head)].double().T * scale
    if cap:
        scores = cap * (scores / cap).tanh()
    if part.allowed is not None:
        scores = scores.masked_fill(~part.allowed[rows], float("-inf"))
    return scores


def causal(queries: int, keys: int, device: Any = "cpu", window: int = -1) -> Any:
    """Which keys a query may see: none after its own position, and only the last few with a window.

    The queries are the last positions of the keys.
    """
    import torch

    at = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    seen = key <= at
    return seen & (at - key <= window) if window > 0 else seen


def rounded(values: Any, kind: Any) -> Any:
    """Values as a narrower type holds them."""
    return values.to(kind).to(values.dtype)


def picked(rows: Any, places: Any) -> Any:
    """Some rows of a tensor; fp8 ones too, which torch indexes on no CPU before 2.10."""
    import torch

    if rows.element_size() > 1:
        return rows[places.long()]
    return rows.view(torch.uint8)[places.long()].view(rows.dtype)
