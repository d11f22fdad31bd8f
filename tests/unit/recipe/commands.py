"""A quoted command and a launch as lists of the same kind, and what tells one from the other."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

from pipeline.serving.recipe.launch import Launch
from pipeline.serving.recipe.model import Recipe

NOTHING = "nothing"
PROGRAMS = (
    "python3 -m vllm.entrypoints.openai.api_server",
    "python3 -m sglang.launch_server",
    "vllm serve",
)


def parts(command: str) -> list[str]:
    """Variables, the program, plain words, and flags with their values, of a command in text."""
    command = command.replace("\\\n", " ")
    if command.split() == [NOTHING]:
        return []
    return list(_parts(shlex.split(command)))


def launch_parts(launch: Launch, *, program: bool) -> list[str]:
    """What a launch gives the engine: environment and arguments, and the program if asked for."""
    words = [*(launch.program if program else []), *launch.arguments]
    return [*(f"{k}={v}" for k, v in launch.environment.items()), *_parts(words)]


def rendered_parts(text: str, launch: Launch, image: str, *, program: bool) -> list[str]:
    """A printed `docker run` or `podman run`, with what the image starts in its place if asked."""
    words = shlex.split(text.replace("\\\n", " "))
    at = words.index(image)
    started = [*(launch.program if program else []), *words[at + 1 :]]
    return [*_parts(words[2:at]), *_parts(started)]


def logged_parts(server_args: str) -> list[str]:
    """The flags that lead to the `ServerArgs(...)` of an SGLang log; defaults are none."""
    call = ast.parse(server_args.strip(), mode="eval").body
    assert isinstance(call, ast.Call)
    values = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    return [
        _part("--tp" if name == "tp_size" else "--" + name.replace("_", "-"), value)
        for name, value in values.items()
        if value not in (None, False, "auto")
    ]


def unexplained(recipe: Recipe, document: Sequence[str], ours: Sequence[str]) -> list[str]:
    """Differences that `changes` does not name, and what it names without there being one."""
    told_away = Counter(part for c in recipe.changes for part in parts(c.document))
    told_new = Counter(part for c in recipe.changes for part in parts(c.here))
    away, new = Counter(document) - Counter(ours), Counter(ours) - Counter(document)
    return [
        *(f"left out without a word: {part}" for part in (away - told_away).elements()),
        *(f"added without a word: {part}" for part in (new - told_new).elements()),
        *(f"not left out, or not there: {part}" for part in (told_away - away).elements()),
        *(f"not added: {part}" for part in (told_new - new).elements()),
    ]


def _parts(words: Sequence[str]) -> Iterator[str]:
    rest = list(words)
    while rest:
        program = next((p for p in PROGRAMS if rest[: len(p.split())] == p.split()), None)
        if program is not None:
            del rest[: len(program.split())]
            yield program
        elif rest[0] == "pip":  # a command of its own
            yield " ".join(rest)
            return
        else:
            yield _next_part(rest)


def _next_part(rest: list[str]) -> str:
    word = rest.pop(0)
    if not word.startswith("-") or not rest or rest[0].startswith("-"):
        return word
    value = rest.pop(0)
    if word == "-e":
        return value
    if word == "-v" and (mount := re.fullmatch(r".*:(/\w+):ro(,Z)?", value)):
        return f"{mount[1]} read-only"
    if word == "-v" and (volume := re.fullmatch(r"sm120-.*:(/[\w/]+)", value)):
        return f"{volume[1]} kept"
    return _part(word, value)


def _part(flag: str, value: object) -> str:
    """0.90 is 0.9, and JSON is the same with and without spaces."""
    if value is True:
        return flag
    text = str(value)
    if text.startswith("{"):
        return f"{flag} {json.dumps(json.loads(text), sort_keys=True)}"
    try:
        return f"{flag} {float(text)}"
    except ValueError:
        return f"{flag} {text}"
