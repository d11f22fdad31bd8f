"""Published runs, and our numbers beside them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Literal

from pipeline.core.errors import DoesNotFit
from pipeline.core.model import Frozen
from pipeline.core.yaml_file import read_yaml
from pipeline.serving.fit.answer import FitAnswer, answer
from pipeline.serving.fit.config import architecture_of
from pipeline.serving.fit.engine import (
    FitQuestion,
    kv_token_bytes,
    request_bytes,
    room_of,
    sglang_default_fraction,
)
from pipeline.serving.fit.facts import fact_of
from pipeline.serving.fit.parts import require_divisible, tensor_parts
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.fit.units import GIB

_FILE = Path(__file__).with_name("published_runs.yaml")


class Config(Frozen):
    source: str
    like: str = ""  # another, of which this one differs in what follows
    config: dict[str, Any]


class Case(Frozen):
    model: str
    config: str
    engine: Literal["sglang", "vllm", "llama.cpp"]
    cards: str
    card_mib: int
    tp: int
    context: int
    ask: dict[str, Any] = {}
    tokens: int = 0
    what: Literal["KV tokens", "weights in GiB", "share it chooses", "cache in GiB", "refused"]
    published: float
    within: float = 0.0
    source: str
    remark: str = ""


class Published(Frozen):
    configs: dict[str, Config]
    cases: list[Case]


@cache
def published() -> Published:
    return read_yaml(_FILE, Published)


def architecture(case: Case) -> Architecture:
    own = published().configs.get(case.config)
    if own is not None:
        base = published().configs[own.like].config if own.like else {}
        return architecture_of(base | own.config)
    fact = fact_of(case.config)
    assert fact is not None, case.config
    return fact.architecture()


def question(case: Case) -> FitQuestion:
    values = {"engine": "vllm" if case.engine == "llama.cpp" else case.engine, "tp": case.tp}
    values |= {"card_bytes": case.card_mib << 20, "context": case.context}
    return FitQuestion.model_validate(values | case.ask)


def answered(case: Case) -> FitAnswer:
    return answer(architecture(case), question(case))


def ours(case: Case) -> float:
    """The same number as the published one, by our sum."""
    model, asked = architecture(case), question(case)
    if case.what == "KV tokens":
        return answered(case).room.kv_tokens
    if case.what == "share it chooses":
        return sglang_default_fraction(model, asked)
    if case.what == "weights in GiB":
        weights = sum(p.card_bytes(case.tp) for p in tensor_parts(model, asked.engine, case.tp))
        # sglang's log counts all that loading takes, vLLM's only tensors
        kernels = answered(case).room.kernels_bytes if case.engine == "sglang" else 0
        return (weights + kernels) / GIB
    if case.what == "cache in GiB":
        kv = asked.kv_of(model)
        requests = case.tokens / case.context
        whole = room_of(model, 0, asked).request_bytes
        if case.engine == "llama.cpp":
            whole = request_bytes(model, case.tp, kv, case.context)
        fixed = whole * requests
        return (kv_token_bytes(model, case.tp, kv) * case.tokens + fixed) / GIB
    return refused_width(model, case.tp)


def refused_width(model: Architecture, tp: int) -> int:
    """What of a matrix a card would have where engines refuse it; 0 where they do not."""
    try:
        require_divisible(model, tp)
    except DoesNotFit as error:
        return int(str(error).split(": ")[1].split()[0])
    return 0


def error_percent(case: Case) -> float:
    return 100 * (ours(case) - case.published) / case.published


def _number(value: float, case: Case) -> str:
    if case.what == "KV tokens":
        return f"{value:,.0f}"
    if case.what == "refused":
        return f"refused: {value:.0f} of a matrix on a card"
    return f"{value:.3f}" if case.what == "share it chooses" else f"{value:.2f}"


def _row(case: Case) -> str:
    between = ""
    if case.what == "KV tokens":
        found = answered(case)
        between = f" ({found.low_tokens:,} to {found.high_tokens:,})"
    theirs, own = _number(case.published, case), _number(ours(case), case)
    percent = "" if case.what == "refused" else f"{error_percent(case):+.1f} %"
    what = "" if case.what == "refused" else case.what
    remark = f" ({case.remark})" if case.remark else ""
    cells = [case.model, case.engine, case.cards, what, theirs, own + between, percent]
    return "| " + " | ".join([*cells, f"{case.source}{remark}"]) + " |"


def table() -> str:
    """As it stands in docs/fit.md."""
    head = "| model | engine | cards | what | published | ours | error | source |\n"
    return head + "|---|---|---|---|---|---|---|---|\n" + "\n".join(map(_row, published().cases))
