"""Part `agreement`: at fixed places of fixed texts, the server expects what a reference expected.

Teacher-forced: it asks for every place with the text before it, so that one other choice does not
change all that follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from pipeline.core.errors import ScoresInvalid
from pipeline.core.files import write_bytes
from pipeline.core.model import FILE_VERSION, Count, ForeignModel, Frozen, canonical_json, sha256_of
from pipeline.core.verdict import TestVerdict, worst
from pipeline.serving.quality.estimate import bootstrap
from pipeline.serving.quality.model import QualityNumber, QualityPart, QualityPlan, QualityRow
from pipeline.serving.quality.probes import Probe
from pipeline.serving.quality.session import QualitySession
from pipeline.serving.smoke.chat import GivenToken, Token, logprobs_fault
from pipeline.serving.smoke.client import Gone, NotOffered, Unsound
from pipeline.serving.smoke.session import optional

_COMPLETIONS, _TOP = "/v1/completions", 5
_MOST_BYTES, _MOST_ROWS = 256 << 20, 40
_Logprob = Annotated[float, Field(le=1e-3, ge=-1e9, allow_inf_nan=False)]
_TokenText = Annotated[str, Field(max_length=1000)]


class RecordedPlace(Frozen):
    """What the reference expected at a place: its choice first."""

    at: Count
    is_protocol: bool
    top: Annotated[list[tuple[_TokenText, _Logprob]], Field(min_length=1, max_length=100)]


class RecordedText(Frozen):
    """A text with its places."""

    text: str
    places: list[RecordedPlace]


class AgreementReference(Frozen):
    """What a trusted server expected, in a file."""

    format: Annotated[Literal[1], FILE_VERSION] = 1
    model: str
    url: str
    texts: list[RecordedText]


class _Legacy(ForeignModel):
    """Log probabilities of completions, as vLLM and SGLang write them."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None] | None = None


def first_token(value: Any) -> Token:
    """The token that a completion begins with; llama.cpp writes it as chats have it."""
    try:
        given = value["choices"][0]["logprobs"]
        is_chat = "content" in given
        if not given["content" if is_chat else "tokens"]:
            raise LookupError("there is no token")
    except (LookupError, TypeError) as error:
        raise NotOffered(f"{_COMPLETIONS} gives no log probabilities") from error
    try:
        if is_chat:
            token = GivenToken.model_validate(given["content"][0]).token_value
        else:
            legacy = _Legacy.model_validate(given)
            others = (legacy.top_logprobs or [None])[0] or {}
            token = Token(legacy.tokens[0], legacy.token_logprobs[0], (*others.items(),))
    except (LookupError, TypeError, ValidationError) as error:
        # NaN is no number in JSON: llama.cpp writes null, and answers all the same
        raise Unsound("a log probability is no number: the logits may be NaN") from error
    if not token.top:
        raise NotOffered(f"{_COMPLETIONS} names only the token that it chose")
    if fault := logprobs_fault([token]):
        raise Unsound(fault)
    # most probable first; the chosen one may be missing from the list, or be in it
    best = sorted({(token.text, token.logprob), *token.top}, key=lambda each: (-each[1], each[0]))
    return Token(token.text, token.logprob, tuple(best))


async def ask_place(session: QualitySession, text: str) -> Token:
    """Asks the server what comes next."""
    body = {
        "model": session.model,
        "prompt": text,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": _TOP,
        # the template has written the first token already, where the model has one
        "add_special_tokens": False,
    }
    with optional("log probabilities"):
        _, value = await session.client.post(_COMPLETIONS, body, optional=True)
    return first_token(value)


async def record_agreement(
    session: QualitySession, url: str, chosen: Sequence[Probe]
) -> AgreementReference:
    """Ask one place after the other, so that nothing depends on a batch."""
    asked = [(probe, at) for probe in chosen for at, _ in probe.places]

    async def ask(one: tuple[Probe, int]) -> Token:
        probe, at = one
        return await ask_place(session, probe.text[:at])

    found = iter(await session.each(asked, ask, "place", at_once=1))
    texts = [
        RecordedText(
            text=probe.text,
            places=[
                RecordedPlace(at=at, is_protocol=is_protocol, top=list(next(found).top))
                for at, is_protocol in probe.places
            ],
        )
        for probe in chosen
    ]
    return AgreementReference(model=session.model, url=url, texts=texts)


def write_reference(path: Path, reference: AgreementReference) -> None:
    """Writes a reference: the same bytes for the same answers."""
    write_bytes(path, canonical_json(reference.model_dump(mode="json")) + b"\n")


def read_reference(path: Path) -> tuple[AgreementReference, str]:
    """Reads a recorded reference and its digest."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ScoresInvalid(f"{path}: is larger than {_MOST_BYTES} bytes")
        data = path.read_bytes()
        return AgreementReference.model_validate_json(data), sha256_of(data)
    except (OSError, ValidationError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ScoresInvalid(
            f"{path}: is no reference: {why}", "Record one: `sm120 quality URL --record FILE`."
        ) from error


class PlaceResult(Frozen):
    """One place of the server, held against the reference."""

    is_protocol: bool
    is_decided: bool  # the reference's second choice was further off than a tie
    agrees: bool
    nats: float  # how far the log probability of the reference's choice is off
    is_bound: bool  # the server does not name that choice: it is off by so much at least
    message: str = ""

    @classmethod
    def compared(cls, place: RecordedPlace, got: Token, tie_nats: float) -> PlaceResult:
        """Compares what the server expects, and how sure it is."""
        want, logprob = place.top[0]
        second = place.top[1][1] if len(place.top) > 1 else -1e9
        named = dict(got.top)
        agrees = got.top[0][0] == want
        other = named.get(want, min(named.values()))
        return cls(
            is_protocol=place.is_protocol,
            is_decided=logprob - second > tie_nats,
            agrees=agrees,
            # one that is not named is less probable than all that are
            nats=abs(other - logprob) if want in named else max(0.0, logprob - other),
            is_bound=want not in named,
            message="" if agrees else f"{want!r} ({logprob:.2f}) became {got.text!r}",
        )


async def judge_agreement(
    session: QualitySession, reference: AgreementReference, digest: str
) -> QualityPart:
    """Ask every place of the reference, and compare."""
    tie = session.plan.tie_nats
    asked = [(text, place) for text in reference.texts for place in text.places]

    async def ask(one: tuple[RecordedText, RecordedPlace]) -> PlaceResult | str:
        text, place = one
        try:
            got = await ask_place(session, text.text[: place.at])
            return PlaceResult.compared(place, got, tie)
        except Gone:
            raise
        except Unsound as error:
            return str(error)[:300]

    try:
        found = iter(await session.each(asked, ask, "place"))
    except NotOffered as error:
        inputs = {"reference": digest}
        return QualityPart(name="agreement", verdict="unknown", message=str(error), inputs=inputs)
    groups = [[next(found) for _ in text.places] for text in reference.texts]
    return agreement_part(groups, session.plan, {"reference": digest})


def agreement_part(
    groups: Sequence[Sequence[PlaceResult | str]], plan: QualityPlan, inputs: dict[str, str]
) -> QualityPart:
    """The verdict on all places; places of one text count as one group."""
    failed = [each for group in groups for each in group if isinstance(each, str)]
    judged = [[each for each in group if not isinstance(each, str)] for group in groups]
    places = [place for group in judged for place in group]
    if not places:
        verdict: TestVerdict = "failed" if failed else "unknown"
        why = failed[0] if failed else "the reference holds no place"
        return QualityPart(name="agreement", verdict=verdict, message=why, inputs=inputs)
    numbers: list[QualityNumber] = []
    verdicts: list[TestVerdict] = ["failed"] if failed else []
    kinds = {"all": [False, True], "protocol": [True]}
    for kind, wanted in kinds.items():
        chosen = [[p for p in group if p.is_protocol in wanted] for group in judged]
        if not any(chosen):
            continue
        decided = [[float(p.agrees) for p in group if p.is_decided] for group in chosen]
        if any(decided):
            share, bar = bootstrap(decided, is_share=True), plan.least_agreement
            name = f"top-1 agreement, {kind} places"
            numbers.append(QualityNumber(name=name, unit="share", estimate=share, bar=bar))
            verdicts.append(share.at_least(bar))
        nats = bootstrap([[p.nats for p in group] for group in chosen])
        name, bar = f"mean |Δlogprob|, {kind} places", plan.most_nats
        numbers.append(QualityNumber(name=name, unit="nats", estimate=nats, bar=bar))
        verdicts.append(nats.at_most(bar))
    ties = sum(not p.is_decided for p in places)
    bounds = sum(p.is_bound for p in places)
    message = f"{len(places)} places of {len(groups)} texts; {ties} ties are not counted"
    message += f"; {bounds} choices are not named, and off by more" if bounds else ""
    message += f"; {len(failed)} places failed: {failed[0]}" if failed else ""
    wrong = [p for p in places if p.is_decided and not p.agrees][:_MOST_ROWS]
    rows = [
        QualityRow(name=f"place {n}", verdict="failed", message=p.message)
        for n, p in enumerate(wrong)
    ]
    return QualityPart(
        name="agreement",
        verdict=worst(verdicts, "unknown"),
        message=message,
        numbers=numbers,
        rows=rows,
        inputs=inputs,
    )
