"""Rung 5: every prompt length, up to the whole context, with counts that are true."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial

from pipeline.serving.smoke.client import NotOffered, RequestRefused, Unsound
from pipeline.serving.smoke.compare import parting, reference
from pipeline.serving.smoke.model import ANSWER_TOKENS
from pipeline.serving.smoke.rungs.tools import message_answer
from pipeline.serving.smoke.session import CheckSpec, Rung, SmokeSession
from pipeline.serving.smoke.tasks import (
    Haystack,
    SmokeQuestion,
    additions,
    countings,
    haystack,
    records,
)

LENGTH = Rung("length", "Every prompt length up to the whole context")
_WRONG_SHARE = 0.05
_AT_ONCE = 4
_SHORT_ANSWER = 32
_TILE, _TILES = 64, 4
_OTHER_SUMS = 3
_SURE_COMMAS = 0.9
_MOST_RECORD_TOKENS = 65_536
_MEASURED_RECORDS, _FEWEST_RECORDS = (2, 18), 24
_WRONG_RECORDS = 1  # of eight: models take a neighbour's now and then
_NO_QUESTION = SmokeQuestion("Say yes.", "")
_SHORTEST_STEP = 512
_MEASURED = (4, 40)  # sentences, at least and at most
_CUT = re.compile(r'"truncated":\s*true')
UNKNOWN_CONTEXT = "the server does not say how long its context is: use --context"
# Of the tokens planned for a prompt; the text gets its size from the server's earlier counts.
_CLOSE = (0.75, 1.02)


def _unknown(session: SmokeSession) -> str:
    return UNKNOWN_CONTEXT if session.context_tokens is None else ""


def contexts_of(session: SmokeSession) -> list[int]:
    """The steps of the walk: the recipe's that the server has, else parts of the server's."""
    most = session.context_tokens
    if session.plan.contexts:
        return sorted(n for n in set(session.plan.contexts) if most is None or n <= most)
    if most is None:
        return []
    most = min(most, session.plan.walk_tokens or most)
    return sorted({n for n in (most // 4, most // 2) if n >= _SHORTEST_STEP} | {most})


def prompt_for(stack: Haystack, question: SmokeQuestion) -> str:
    """Puts the text first: a server can keep what several questions share."""
    return f"{stack.text}\n\n{question.prompt}"


async def measure_text(session: SmokeSession) -> None:
    """How many tokens a sentence has, and what a chat template adds."""
    least, most = _MEASURED
    more = max(least, min(most, (session.context_tokens or 8192) // 200))
    counts = []
    for sentences in (2, 2 + more):
        text = haystack(sentences, [], 0).text
        answer = await session.ask(f"{text}\n\nSay yes.", max_tokens=1)
        counts.append(answer.prompt_tokens)
    short, long = counts
    session.sentence_tokens = (long - short) / more
    if session.sentence_tokens < 1:
        raise Unsound(f"{more} sentences more are {long - short} tokens more")
    session.frame_tokens = max(0.0, short - 2 * session.sentence_tokens)


async def sized_haystack(session: SmokeSession, tokens: int, seed: int) -> Haystack:
    """Makes a text of nearly so many tokens, as this server counts them, and never more."""
    if not session.sentence_tokens:
        await measure_text(session)
    depths, each = session.plan.depths, session.sentence_tokens
    # a needle is shorter than a sentence, and a question about it not much longer
    around = session.frame_tokens + each * (len(depths) + 2)
    if around + each > tokens:
        raise NotOffered(f"{max(0, tokens)} tokens are too few for {len(depths)} needles in a text")
    return haystack(int((0.97 * tokens - around) / each), depths, seed)


async def _at_length(session: SmokeSession, tokens: int, seed: int) -> str:
    """Asks for a needle at every depth, and for the first again: its text may now be cached."""
    room = session.room(_SHORT_ANSWER)
    tokens -= room
    stack = await sized_haystack(session, tokens, seed)
    # a short text cannot be nearer to its size than its parts are long
    near = session.sentence_tokens * (len(session.plan.depths) + 2)
    counts, answers, wrong = [], [], []
    for question in stack.needles:
        answer = await session.ask_known(prompt_for(stack, question), max_tokens=room)
        session.require_clean(answer)
        # the server's own count says whether the whole prompt was read
        counted = answer.prompt_tokens
        if not _CLOSE[0] * tokens - near <= counted <= _CLOSE[1] * tokens:
            raise Unsound(f"a prompt of about {tokens} tokens was sent, usage counts {counted}")
        if session.plan.quality and (why := question.mistake(answer.text)):
            wrong.append(why)
        counts.append(counted)
        answers.append(answer)
    if wrong:
        raise Unsound(f"{len(wrong)} of {len(stack.needles)} needles are lost: {wrong[0]}")
    again = await session.ask(prompt_for(stack, stack.needles[0]), max_tokens=room, stream=True)
    session.require_same(reference(answers[0]), [again])
    return f"{counts[0]} tokens, needles at {len(stack.needles)} depths"


def _padded(words: int, question: SmokeQuestion) -> str:
    return f"Ignore these words:{' sea' * words}.\n\n{question.prompt}"


@LENGTH.check("consecutive lengths")
async def _lengths(session: SmokeSession) -> str:
    """One word more each time: a wrong digit where the length ≡ 3 mod 4 was vllm#55927.

    Then around multiples of 64, where blocks of a cache and tiles of a kernel end.
    """
    count = session.plan.lengths
    if session.context_tokens:
        # also where a tokenizer has a token for each letter
        count = max(4, min(count, session.context_tokens // 16))
    room, words = session.room(_SHORT_ANSWER), list(range(1, count + 1))
    prompts = [_padded(n, q) for n, q in zip(words, additions(count), strict=True)]
    answers = await session.ask_clean(prompts, _AT_ONCE, max_tokens=room)
    # streams may come without usage; all of the others are compared
    counts = [a.usage.prompt_tokens for a in answers if a.usage]
    if not counts:
        raise Unsound("the answers have no usage")
    # all questions are equally long, so that each prompt has a token more than the one before
    if sorted(counts) != counts or len(set(counts)) < len(counts) // 2:
        raise Unsound(f"prompts grow word by word, and usage does not: {counts[:12]}")
    each = (counts[-1] - counts[0]) / max(1, words[-1] - words[0]) or 1.0
    most = (session.context_tokens or 8 * _TILE) // 2
    edges = {
        round(words[0] + (_TILE * k + near - counts[0]) / each)
        for k in range(1, _TILES + 1)
        for near in (-1, 0, 1)
        if _TILE * k + near < most
    }
    edge_words = sorted(n for n in edges if n > words[-1])
    words += edge_words
    questions = additions(len(words))
    prompts = [_padded(n, q) for n, q in zip(edge_words, questions[count:], strict=True)]
    answers += await session.ask_clean(prompts, _AT_ONCE, max_tokens=room)
    triples = zip(words, questions, answers, strict=True)
    wrong = [(n, q, a) for n, q, a in triples if not q.is_right(a.text)]
    wrong = wrong if session.plan.quality else []
    # a few may be mistakes of the model, and not where other sums of that length are wrong, too
    is_many = len(wrong) > _WRONG_SHARE * len(words)
    for n, _, _ in wrong if not is_many else []:
        others = additions(_OTHER_SUMS, seed=n)
        again = await session.ask_clean([_padded(n, q) for q in others], 1, max_tokens=room)
        if not any(q.is_right(a.text) for q, a in zip(others, again, strict=True)):
            is_many = True
    if is_many:
        lengths = [a.usage.prompt_tokens if a.usage else n for n, _, a in wrong]
        rest, times = Counter(n % 4 for n in lengths).most_common(1)[0]
        pattern = f"; {times} of them ≡ {rest} mod 4" if times > 1 else f", at {lengths[0]} tokens"
        _, question, answer = wrong[0]
        share = f"{len(wrong)} of {len(words)} are wrong{pattern}"
        raise Unsound(f"{share}; {question.mistake(answer.text)}")
    edge = f", and {len(edge_words)} around multiples of {_TILE}" if edge_words else ""
    return f"{count} lengths, {counts[0]} to {counts[-1]} tokens{edge}"


@LENGTH.check("long answer", "quality")
async def _long_answer(session: SmokeSession) -> str:
    """Caches grow with answers, too, and a stream of many chunks has more to lose."""
    most = min(session.answer_tokens, ANSWER_TOKENS)
    # a number and its comma are two tokens at least, so that the limit ends it
    (question,) = countings(1, most // 2, start=200)
    for stream in (True, False):
        answer = await session.ask(question.prompt, max_tokens=session.room(most), stream=stream)
        session.require_clean(answer)
        if any(dots in answer.text for dots in ("...", "…")):
            raise NotOffered(f"this model leaves numbers out: {answer.text[-60:]!r}")
        if answer.is_cut and not answer.text.strip():
            raise NotOffered("all tokens went into thinking")
        numbers, is_right = re.findall(r"\d+", answer.text), question.is_held(answer.text)
        if answer.is_cut:
            # all that was counted before the limit is right; some say first what they will do
            first, second, _ = question.want.split(", ", 2)
            found = re.search(rf"{first}\D{{1,3}}{second}\D.*", answer.text, re.S)
            is_right = found is not None and not any(c.isalpha() for c in found[0])
            counted = ", ".join(re.findall(r"\d+", found[0])) if found else ""
            is_right = is_right and question.want.startswith(counted)
        # some begin a new line now and then, and none leaves out one comma of hundreds
        gaps = Counter(re.findall(r"(?<=\d)\D+(?=\d)", answer.text))
        commas = sum(n for gap, n in gaps.items() if "," in gap)
        lost = [gap for gap in gaps if "," not in gap and not any(c in gap for c in "\n.;:")]
        if lost and is_right and commas > _SURE_COMMAS * sum(gaps.values()):
            place = re.search(rf"\d+{re.escape(lost[0])}\d+", answer.text)
            raise Unsound(f"a comma is lost at {place[0] if place else ''!r}, of {commas}")
        if not is_right:
            ends = f"it ends with {answer.text[-60:]!r}"
            raise Unsound(f"{len(numbers)} numbers, {answer.finish!r}: {ends}")
    return f"{len(numbers)} numbers, in a stream and whole"


@LENGTH.check("longer than one batch", skip=_unknown)
async def _batch(session: SmokeSession) -> str:
    """A prompt that is computed in pieces: ggml-org/llama.cpp#26509."""
    assert session.context_tokens is not None
    batch = session.plan.batch_tokens
    tokens = min(int(2.5 * batch), int(0.9 * session.context_tokens))
    if tokens < 1.5 * batch:
        raise NotOffered(f"the context has no room for more than one batch of {batch} tokens")
    return await _at_length(session, tokens, seed=tokens + 1)


@LENGTH.parts.append
def _walk(session: SmokeSession) -> list[CheckSpec]:
    """Checks each context, including those of the recipe that the server cannot take."""
    most, served = session.context_tokens, session.plan.served_tokens
    walk = [
        CheckSpec(f"context {n}", "mechanics", partial(_at_length, tokens=n, seed=n))
        for n in contexts_of(session)
    ]

    async def fail(_: SmokeSession, tokens: int) -> str:
        raise Unsound(f"the recipe expects {tokens} tokens, the server has only {most}")

    def skip(_: SmokeSession, tokens: int) -> str:
        # the recipe's next start has more, or else the server lacks what was promised
        if served is None or tokens <= served:
            return ""
        return f"the recipe starts with {served} tokens: serve it with --max-model-len {tokens}"

    for n in (n for n in session.plan.contexts if most is not None and n > most):
        run, why = partial(fail, tokens=n), partial(skip, tokens=n)
        walk.append(CheckSpec(f"context {n}", "mechanics", run, why))
    return walk or [CheckSpec("context", "mechanics", _batch, _unknown)]


@LENGTH.check("needles among their like", "quality", _unknown)
async def _among_their_like(session: SmokeSession) -> str:
    """Records whose codes are permuted digits, with a kept text and with one never seen before."""
    room = session.room(_SHORT_ANSWER)
    tokens = min(contexts_of(session)[-1:] or [_MOST_RECORD_TOKENS])
    tokens = min(tokens, _MOST_RECORD_TOKENS) - room
    # the server counts how long a record is
    counts = []
    for number in _MEASURED_RECORDS:
        answer = await session.ask(prompt_for(records(number, 1), _NO_QUESTION), max_tokens=1)
        counts.append(answer.prompt_tokens)
    each = max(1.0, (counts[1] - counts[0]) / (_MEASURED_RECORDS[1] - _MEASURED_RECORDS[0]))
    count = min(int(0.9 * (tokens - counts[0]) / each), 90_000)
    if count < _FEWEST_RECORDS:
        raise NotOffered(f"{tokens} tokens have no room for {_FEWEST_RECORDS} records")
    wrong = []
    for head in ("", "Archive {}"):
        for number in range(len(records(_FEWEST_RECORDS, 2).needles)):
            # a head of its own for each question, or one text for all
            stack = records(count, 2, head.format(number))
            answer = await session.ask(
                prompt_for(stack, stack.needles[number]), max_tokens=room, stream=number % 2 == 1
            )
            if why := stack.needles[number].mistake(answer.text):
                other = re.findall(r"\d{4}", answer.text)[-1:]
                is_like = bool(other) and sorted(other[0]) == sorted(stack.needles[number].want)
                kind = "with the digits in another order" if is_like else "of no such record"
                wrong.append(f"{why}, {kind}{', text never seen before' if head else ''}")
    if len(wrong) > _WRONG_RECORDS:
        raise Unsound(f"{len(wrong)} of {2 * len(stack.needles)} records: {wrong[0]}")
    return f"{count} records, {2 * len(stack.needles)} questions, {len(wrong)} wrong"


@LENGTH.check("long answer at length", "quality", _unknown)
async def _long_at_length(session: SmokeSession) -> str:
    """Many tokens of an answer after a long prompt: both grow the cache."""
    assert session.context_tokens is not None
    most = min(session.answer_tokens, ANSWER_TOKENS, session.context_tokens // 4)
    tokens = min([session.context_tokens, *contexts_of(session)[-1:]]) - session.room(most)
    stack = await sized_haystack(session, tokens * 3 // 4, seed=9)
    (question,) = countings(1, most // 5, start=300)
    answer = await session.ask(prompt_for(stack, question), max_tokens=session.room(most))
    session.require_clean(answer)
    if not question.is_held(answer.text):
        # models with few tokens for a number are cut before the end
        shown = ", ".join(re.findall(r"\d+", answer.text))
        if not (answer.is_cut and question.want.startswith(shown)):
            raise Unsound(f"after a long text: {parting(question.want, shown, ('wanted', 'got'))}")
    return f"{answer.text.count(',') + 1} numbers after {answer.prompt_tokens} tokens"


@LENGTH.check("/v1/messages near the full context", skip=_unknown)
async def _messages(session: SmokeSession) -> str:
    """/v1/messages near the full context: vllm-project/vllm#42400."""
    assert session.context_tokens is not None
    room = session.room(_SHORT_ANSWER)
    # no further than the walk, which knows how slow the machine is
    tokens = min([session.context_tokens, *contexts_of(session)[-1:]]) - room
    stack = await sized_haystack(session, tokens, seed=4)
    question = stack.needles[-1]
    answer = await message_answer(session, prompt_for(stack, question), room)
    if session.plan.quality and (why := question.mistake(answer.text)):
        raise Unsound(f"/v1/messages: {why}")
    return f"an answer; the server counts {answer.prompt_tokens} tokens"


@LENGTH.check("longer than the context", skip=_unknown)
async def _too_long(session: SmokeSession) -> str:
    """More than fits is refused with a reason, and the server lives on."""
    assert session.context_tokens is not None
    if not session.sentence_tokens:
        await measure_text(session)
    stack = haystack(int(2 * session.context_tokens / session.sentence_tokens), [], seed=3)
    try:
        answer = await session.ask(f"{stack.text}\n\nSay yes.", max_tokens=8)
        counted = answer.usage.prompt_tokens if answer.usage else "?"
        # llama.cpp has a word for it; an empty answer that ends by its length is one, too
        if not (_CUT.search(answer.exchange.answer) or (answer.is_cut and answer.is_empty)):
            raise Unsound(
                f"a prompt of twice the context was cut to {counted} tokens without a word:"
                f" {answer.finish!r}, {answer.text[:40]!r}"
            )
        note = "is cut, and the answer says so"
    except RequestRefused as error:
        if error.status >= 500 and "context" not in error.answer:
            raise
        note = "is refused"
    after = await session.ask("Say hello.", max_tokens=session.room(_SHORT_ANSWER))
    session.require_clean(after)
    return f"a prompt of twice the context {note}; the next answer is good"
