"""Rung 2: the answers are right, and written by a model rather than by a broken kernel."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from pipeline.artifacts.containers.sandbox import find_sandbox
from pipeline.artifacts.containers.start import SYSTEM
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.serving.smoke import tasks
from pipeline.serving.smoke.chat import ChatAnswer, logprobs_fault, tokens_fault
from pipeline.serving.smoke.client import NotOffered, Unsound
from pipeline.serving.smoke.compare import reference, written_text
from pipeline.serving.smoke.session import Rung, SmokeSession, optional

ANSWERS = Rung("answers", "The answers are right and clean")
_RIGHT_SHARE = 0.9
# of word problems, where small models make real mistakes: rtx6kpro#61 had 0.5 of 0.89
_GRADED_SHARE = 0.75
_LOGPROB_TOKENS = 16
_RANDOM = "Write a random number between 1 and 1000000. Write nothing else."
_LONGEST_CODE_S = 20.0


@ANSWERS.check("logprobs")
async def _logprobs(session: SmokeSession) -> str:
    prompt = tasks.countings(2)[1].prompt
    options = {"logprobs": True, "top_logprobs": 5, "max_tokens": _LOGPROB_TOKENS}
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
    texts = [written_text(await session.ask(_RANDOM, max_tokens=16)) for _ in range(3)]
    # two that are equally probable may take turns
    if len(set(texts)) == 3:
        raise Unsound(f"at temperature 0 three answers: {texts}")
    return "the same answer where many are possible"


@ANSWERS.check("seed")
async def _seed(session: SmokeSession) -> str:
    options = {"temperature": 1.0, "seed": 1234, "max_tokens": 64}
    with optional("no seed"):
        texts = [written_text(await session.ask(_RANDOM, **options)) for _ in range(3)]
    # best effort, as OpenAI says it: only where no two agree is it ignored
    if len(set(texts)) == 3:
        raise Unsound(f"one seed gave three answers: {texts}")
    return "one seed, one answer"


async def _graded(
    session: SmokeSession, questions: Sequence[tasks.SmokeQuestion], least: float
) -> str:
    answers = await session.ask_clean([q.prompt for q in questions], 4)
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
    prompt = "Describe in about six English sentences what happens at a harbour in the morning."
    answer = await session.ask_known(prompt)
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
    """The answer's JSON is valid and right."""
    schema = {"name": "person", "strict": True, "schema": tasks.PERSON_SCHEMA}
    wanted = {"type": "json_schema", "json_schema": schema}
    prompt = f"{tasks.PERSON_TEXT}\nGive the name, age, city and languages of this person as JSON."
    for stream in (False, True):
        # a server that knows the field in a whole answer must know it in a stream
        with nullcontext() if stream else optional("no JSON by schema"):
            answer = await session.ask(prompt, response_format=wanted, stream=stream)
        try:
            value = read_json(answer.text.encode(), most_bytes=1 << 20)
        except JsonInvalid as error:
            raise Unsound(f"the answer {error}: {answer.text[:200]!r}") from error
        if why := tasks.violation(value, tasks.PERSON_SCHEMA):
            raise Unsound(f"{why}: {answer.text[:200]!r}")
        if value != tasks.PERSON:
            raise Unsound(
                f"the answer is {json.dumps(value, ensure_ascii=False)}, not {tasks.PERSON}"
            )
    return "valid and right, whole and as a stream"


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
