"""Rung 2: the answers are right, and written by a model rather than by a broken kernel."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pipeline.artifacts.containers.sandbox import find_sandbox
from pipeline.artifacts.containers.start import SYSTEM
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.serving.smoke import tasks
from pipeline.serving.smoke.chat import ChatAnswer, ask_choices, logprobs_fault, tokens_fault
from pipeline.serving.smoke.client import NotOffered, RequestRefused, Unsound
from pipeline.serving.smoke.compare import reference, written_text
from pipeline.serving.smoke.schema import schema_fault
from pipeline.serving.smoke.session import Rung, SmokeSession, answers_of, optional

ANSWERS = Rung("answers", "The answers are right and clean")
_RIGHT_SHARE = 0.9
# of word problems, where small models make real mistakes: rtx6kpro#61 had 0.5 of 0.89
_GRADED_SHARE = 0.75
_LOGPROB_TOKENS = 16
_PROSE = "Describe in about six English sentences what happens at a harbour in the morning."
_RANDOM = "Write a random number between 1 and 1000000. Write nothing else."
_LONGEST_CODE_S = 20.0
# Many answers are as good, so a server that samples gives others each time.
_INVENT = "Invent a ship with a strange name, and say in one sentence where it sails."
_HOT, _DRAWS = 1.5, 4
_LEAST_SHARE = 0.1  # of the most probable token: engines leave out others before they sample
_BY_CHANCE = 1e-4  # all draws equal
_MISREAD_SHARE = 0.05
_SCHEMA_ASKS = 4  # times the questions of the plan: a fault in one of ten must show


@ANSWERS.check("logprobs")
async def _logprobs(session: SmokeSession) -> str:
    prompt = tasks.countings(2)[1].prompt
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 5, "max_tokens": _LOGPROB_TOKENS}
    with optional("no logprobs"):
        answer = await session.ask(prompt, **options)
    tokens = answer.tokens
    if not tokens or not tokens[0].top:
        raise NotOffered("the server was asked for logprobs and gives none")
    if why := logprobs_fault(tokens):
        raise Unsound(why)
    # vllm-project/vllm#52938; a tiny model may repeat one word, and be sound
    if session.plan.quality and len(tokens) >= 8 and len({token.top for token in tokens}) == 1:
        raise Unsound(
            f"all {len(tokens)} tokens have the same probabilities: the logits are frozen"
        )
    if why := tokens_fault(answer):
        raise Unsound(why)
    _require_counted(answer)
    # fewer than were asked for may be named, and never the chosen one alone
    if max(len(token.top) for token in tokens) < 2:
        raise Unsound(f"5 of top_logprobs were asked for: {[text for text, _ in tokens[0].top]}")
    stream = await session.ask(prompt, stream=True, **options)
    # some give them for the content alone
    if not stream.tokens and not stream.reasoning:
        raise Unsound(f"{len(tokens)} tokens have logprobs, in a stream none")
    session.has_logprobs = True
    return f"{len(tokens)} tokens, the most probable ones chosen"


def _require_counted(answer: ChatAnswer) -> None:
    """As many tokens with logprobs as usage counts."""
    counted = answer.usage.completion_tokens if answer.usage else len(answer.tokens)
    # the token that ends a turn may be counted and not shown, marks of the reasoning, too
    if answer.tokens and not answer.reasoning and abs(len(answer.tokens) - counted) > 1:
        raise Unsound(f"{len(answer.tokens)} tokens have logprobs, and usage counts {counted}")


@ANSWERS.check("the same again")
async def _repeat(session: SmokeSession) -> str:
    """The same prompt again: the second request of a server failed in vllm-project/vllm#31422."""
    prompt = tasks.countings(3)[2].prompt
    first = await session.ask_known(prompt, max_tokens=64)
    again = [await session.ask(prompt, max_tokens=64, stream=s) for s in (False, True, False)]
    for answer in again:
        session.require_clean(answer)
    return session.require_same(reference(first), again)


@ANSWERS.check("temperature 0")
async def _greedy(session: SmokeSession) -> str:
    """Where many answers are nearly as good, a server that takes any shows it."""
    for stream in (False, True):
        options: dict[str, Any] = {"max_tokens": 16, "stream": stream}
        texts = [written_text(await session.ask(_RANDOM, **options)) for _ in range(3)]
        # two that are equally probable may take turns
        if len(set(texts)) == 3:
            raise Unsound(
                f"at temperature 0 three answers{' in streams' if stream else ''}: {texts}"
            )
    return "the same answer where many are possible"


@ANSWERS.check("seed")
async def _seed(session: SmokeSession) -> str:
    for stream in (False, True):
        options: dict[str, Any] = {"temperature": 1.0, "seed": 1234, "max_tokens": 64}
        with optional("no seed"):
            texts = [
                written_text(await session.ask(_RANDOM, stream=stream, **options)) for _ in range(3)
            ]
        # best effort, as OpenAI says it: only where no two agree is it ignored
        if len(set(texts)) == 3:
            raise Unsound(f"one seed gave three answers{' in streams' if stream else ''}: {texts}")
    return "one seed, one answer"


@ANSWERS.check("temperature")
async def _temperature(session: SmokeSession) -> str:
    """Draws at a high temperature differ, where the probabilities say that they must."""
    greedy = await session.ask_known(_INVENT, max_tokens=32)
    chance = 1.0  # that a draw is the greedy answer
    for token in greedy.tokens:
        chosen = max((p for _, p in token.top), default=token.logprob)
        shares = [math.exp((p - chosen) / _HOT) for _, p in set(token.top)]
        chance /= sum(s for s in shares if s >= _LEAST_SHARE ** (1 / _HOT)) or 1.0
    is_known = bool(greedy.tokens) and bool(greedy.tokens[0].top)
    if is_known and chance**_DRAWS > _BY_CHANCE:
        raise NotOffered(f"the model is sure of its words: a draw is the same with {chance:.0%}")
    # nothing says how sure a model is that cannot think
    if not is_known and not session.plan.quality:
        raise NotOffered("without logprobs nobody knows how sure the model is")
    options: dict[str, Any] = {"temperature": _HOT, "top_p": 1, "max_tokens": 32}
    with optional("no temperature"):
        draws = [written_text(await session.ask(_INVENT, **options)) for _ in range(_DRAWS)]
    if len(set(draws)) == 1:
        raise Unsound(f"at temperature {_HOT} {_DRAWS} equal answers: {draws[0][:60]!r}")
    return f"{len(set(draws))} texts in {_DRAWS} draws at temperature {_HOT}"


@ANSWERS.check("n choices")
async def _choices(session: SmokeSession) -> str:
    """Two answers where two were asked for."""
    for stream in (False, True):
        options = {"temperature": 1.0, "max_tokens": 16, "stream": stream}
        try:
            texts = await ask_choices(session.client, session.model, _RANDOM, 2, **options)
        except RequestRefused as error:
            # llama.cpp refused it with 500: "Only one completion choice is allowed"
            if not stream and (error.is_of_field or "choice" in error.answer):
                raise NotOffered(f"one choice only: {error}") from error
            raise
        how = "in a stream" if stream else "whole"
        if sorted(texts) != [0, 1] or not all(text.strip() for text in texts.values()):
            raise Unsound(f"n=2, {how}: {len(texts)} choices: {texts}")
    return "two answers where two were asked for, whole and as a stream"


async def _graded(
    session: SmokeSession, questions: Sequence[tasks.SmokeQuestion], least: float, **options: Any
) -> str:
    answers = await session.ask_clean([q.prompt for q in questions], 4, **options)
    mistakes = [q.mistake(a.text) for q, a in zip(questions, answers, strict=True)]
    wrong = [why for why in mistakes if why]
    right = len(questions) - len(wrong)
    if right < least * len(questions):
        raise Unsound(f"{right} of {len(questions)} are right; {wrong[0]}")
    return f"{right} of {len(questions)} are right"


@ANSWERS.check("arithmetic", "quality")
async def _arithmetic(session: SmokeSession) -> str:
    return await _graded(session, tasks.sums(session.plan.questions), _RIGHT_SHARE)


@ANSWERS.check("word problems", "quality")
async def _word_problems(session: SmokeSession) -> str:
    return await _graded(session, tasks.word_problems(session.plan.questions), _GRADED_SHARE)


@ANSWERS.check("at temperature 1", "quality")
async def _sampled(session: SmokeSession) -> str:
    """As users ask, with a sampler: what is written stays clean, and nearly as often right."""
    questions = [*tasks.sums(session.plan.questions, seed=31), *tasks.word_problems(6, seed=32)]
    graded = await _graded(session, questions, _GRADED_SHARE, temperature=1.0)
    session.require_clean(await session.ask(_PROSE, temperature=1.0))
    return f"{graded}; prose without a fault"


@ANSWERS.check("conversation", "quality")
async def _conversation(session: SmokeSession) -> str:
    """Earlier turns are read, and what stands before them."""
    for what, messages, want in tasks.CONVERSATIONS:
        # templates of some models know no system prompt
        has_system = messages[0]["role"] == "system"
        with optional("no system prompt") if has_system else nullcontext():
            answer = await session.ask(messages)
        session.require_clean(answer)
        if not tasks.SmokeQuestion("", want).is_right(answer.text):
            raise Unsound(f"{what}: {want}, not {answer.text[:120]!r}")
    return "earlier turns and the system prompt are read"


@ANSWERS.check("languages", "quality")
async def _languages(session: SmokeSession) -> str:
    most = session.room(256)
    for language in tasks.LANGUAGES:
        for stream in (False, True):
            answer = await session.ask(language.prompt, max_tokens=most, stream=stream)
            where = f"{language.name}, {'streamed' if stream else 'whole'}"
            try:
                session.require_clean(answer, language.scripts)
            except Unsound as error:
                raise Unsound(f"{where}: {error}") from error
            text = answer.text.casefold()
            if missing := [word for word in language.words if word not in text]:
                raise Unsound(f"{where}: {missing[0]!r} is not in {answer.text[:120]!r}")
    return f"{', '.join(x.name for x in tasks.LANGUAGES)}: whole and as a stream"


@ANSWERS.check("prose", "quality")
async def _prose(session: SmokeSession) -> str:
    """A longer text of its own: what corrupts answers shows after some sentences."""
    answer = await session.ask_known(_PROSE)
    session.require_clean(answer)
    if len(answer.text.split()) < 20:
        raise Unsound(f"six sentences were asked for: {answer.text!r}")
    _require_counted(answer)
    return f"{len(answer.text.split())} words without a fault"


def run_in_sandbox(program: str) -> str:
    """What a program prints; it has no network and no files."""
    sandbox = find_sandbox()
    if not sandbox.isolates:
        raise NotOffered(f"code of a model is not run here: {sandbox.sentence()}")
    # the real one: a virtual environment lies in the user's folders
    python = Path(sys.executable).resolve()
    prefix = Path(sys.base_prefix).resolve()
    read = [] if any(prefix.is_relative_to(folder) for folder in SYSTEM) else [prefix]
    try:
        done = sandbox.run(
            [str(python), "-I", "-S", "-c", program], read=read, timeout_s=_LONGEST_CODE_S
        )
    except subprocess.TimeoutExpired as error:
        raise Unsound(f"the code ran longer than {_LONGEST_CODE_S:g} s") from error
    if done.returncode:
        raise Unsound(f"the code ends with {done.stderr.decode(errors='replace')[-300:]!r}")
    return done.stdout.decode(errors="replace")


@ANSWERS.check("code", "quality")
async def _code(session: SmokeSession) -> str:
    for function, (what, calls) in tasks.CODE_TASKS.items():
        prompt = f"Write a Python function `{function}(n)` that returns {what}."
        answer = await session.ask(f"{prompt} Answer with one code block only.")
        session.require_clean(answer)
        # all of the answer where it has no block
        block = re.search(r"```(?:python|py)?[ \t]*\n(.*?)```", answer.text, re.S)
        code = block[1] if block else answer.text
        # the last line: an answer may print examples of its own before
        printed = session.run_code(f"{code}\nprint([{function}(n) for n in {list(calls)}])\n")
        got, want = printed.strip().rpartition("\n")[2], str(list(calls.values()))
        if got != want:
            raise Unsound(f"{function} for {list(calls)} gives {got[-200:]!r}, not {want}")
    return f"{len(tasks.CODE_TASKS)} functions ran and gave the right results"


@ANSWERS.check("JSON by schema", "quality")
async def json_by_schema(session: SmokeSession) -> str:
    """The JSON of many answers is valid and right, one at a time and several at once."""
    schema = {"name": "person", "strict": True, "schema": tasks.PERSON_SCHEMA}
    wanted = {"type": "json_schema", "json_schema": schema}
    people = tasks.people(max(2, _SCHEMA_ASKS * session.plan.questions))
    first = [person.prompt for person in people[:2]]
    # a server that knows the field in a whole answer must know it in a stream
    with optional("no JSON by schema"):
        answers = [await session.ask(first[0], response_format=wanted)]
    answers.append(await session.ask(first[1], response_format=wanted, stream=True))
    rest = [person.prompt for person in people[2:]]
    answers += answers_of(await session.ask_all(rest, 4, response_format=wanted))
    broken, wrong = [], []
    for person, answer in zip(people, answers, strict=True):
        shown = repr(answer.text[:200])
        try:
            value = read_json(answer.text.encode(), most_bytes=1 << 20)
        except JsonInvalid as error:
            broken.append(f"the answer {error}: {shown}")
            continue
        if why := schema_fault(tasks.PERSON_SCHEMA, value):
            broken.append(f"{why}: {shown}")
        elif value != person.facts:
            wrong.append(f"the answer is {shown}, not {person.facts}")
    # a model may misread a fact, but the server must not write what breaks the schema
    if broken or len(wrong) > _MISREAD_SHARE * len(people):
        raise Unsound(f"{len(broken or wrong)} of {len(people)}: {(broken or wrong)[0]}")
    return f"{len(people)} valid and right, whole and as streams"


@ANSWERS.check("stop words", "quality")
async def _stop(session: SmokeSession) -> str:
    for stream in (False, True):
        prompt, most = tasks.countings(1)[0].prompt, session.room(256)
        answer = await session.ask(prompt, stop=["110"], max_tokens=most, stream=stream)
        text = written_text(answer)
        if "110" in text or answer.finish != "stop" or not text.strip():
            how = "in a stream" if stream else "whole"
            raise Unsound(f"asked to stop at 110, {how}: {answer.finish!r}, {text[-40:]!r}")
    return "stops at a stop word, whole and as a stream"
