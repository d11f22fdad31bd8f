"""The script that describes an engine's parser: on parsers and programs made for it."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.images.engine import print_flags
from pipeline.images.engine.parser_flags import FlagSpec
from pipeline.images.engine.print_flags import Program, describe_parser


def size(value: str) -> int:
    return int(value.removesuffix("k"))


def size_or_auto(value: str) -> int:
    return -1 if value == "auto" else size(value)


@dataclasses.dataclass
class Passes:
    fuse_norm: bool = False


@dataclasses.dataclass
class Settings:
    mode: int | None = None
    passes: Passes = dataclasses.field(default_factory=Passes)
    free: dict[str, Any] | None = None
    sizes: list[int] | None = None


def settings_reader() -> Callable[[str], Any]:
    """A converter that holds its class as vLLM's do: as a default, below another function."""

    def inner(value: str, cls: type = Settings) -> Any:
        return cls(**json.loads(value))

    def outer(value: str) -> Any:
        return None if value == "None" else inner(value)

    return outer


def described(*names: str, **options: Any) -> FlagSpec:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(*names, **options)
    ((_, flag),) = describe_parser(parser)["flags"].items()
    return FlagSpec.model_validate(flag)


@pytest.mark.parametrize(
    ("options", "takes", "kind"),
    [
        ({}, "one", "text"),
        ({"type": int}, "one", "integer"),
        ({"type": float}, "one", "number"),
        ({"type": json.loads}, "one", "json"),
        ({"type": size}, "one", "size"),
        ({"nargs": "+", "type": int}, "many", "integer"),
        ({"nargs": 2}, "many", "text"),
        ({"nargs": "?"}, "optional", "text"),
        ({"action": "store_true"}, "none", "text"),
    ],
)
def test_what_a_flag_takes_is_read_from_the_parser(
    options: dict[str, Any], takes: str, kind: str
) -> None:
    flag = described("--one", **options)
    assert (flag.takes, flag.type, flag.repeats) == (takes, kind, False)


def test_words_choices_and_other_names_are_kept() -> None:
    assert described("--len", type=size_or_auto).words == ["auto"]
    flag = described("-q", "--quant", choices=["fp8", "fp4", None])
    assert (flag.choices, flag.aliases) == (["fp4", "fp8"], ["-q"])
    flag = described("--cache", "-c", action=argparse.BooleanOptionalAction)
    assert (flag.takes, flag.aliases, flag.off) == ("none", ["-c"], ["--no-cache"])
    # a flag that only begins with `no` is no opposite of another
    assert described("--no-cache", action="store_true").off == []
    assert described("--also", action="append").repeats


def test_the_names_in_a_flags_json_are_those_of_its_data_class() -> None:
    flag = described("--config", type=settings_reader())
    assert flag.type == "json"
    assert flag.words == ["None"]
    assert flag.fields == ["free", "free.*", "mode", "passes", "passes.fuse_norm", "sizes"]


def test_a_flag_that_the_parser_knows_only_to_refuse_it_says_so() -> None:
    class Gone(argparse.Action):
        error_message = "Use --new.\n"

        def __call__(self, *_: Any) -> None:
            raise AssertionError

    assert described("--old", action=Gone, nargs=0).retired == "Use --new."


def test_flags_that_exclude_each_other_and_plain_words_are_told() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("model", nargs="?")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--a", action="store_true")
    group.add_argument("--b", action="store_true")
    found = describe_parser(parser)
    assert found["exclusive"] == [["--a", "--b"]]
    assert found["plain_words"] == 1


HELP = """usage: llama-server [options]

general:

  -t,    --threads N              number of threads (default: 2)
  -fa, --flash-attn (on|off)
                                  set Flash Attention (default: on)
         --lora FNAME             adapter (can be repeated)
         --mode {fast,slow}       how it runs
         --ghost N                in the help alone
         --async_mode             with an underscore
  -v,    --verbose                print more
"""
# What each takes: a number of values, and what the program thinks of the first of them.
KNOWN: dict[str, tuple[int, Callable[[str], bool]]] = {
    **dict.fromkeys(("-t", "--threads", "-ot-n"), (1, str.isdigit)),
    **dict.fromkeys(("-fa", "--flash-attn"), (1, lambda value: value in ("on", "off"))),
    **dict.fromkeys(("-v", "--verbose", "--async-mode"), (0, lambda _: True)),
    "--lora": (1, lambda _: True),
    "--mode": (1, lambda _: True),
    "--override-tensor": (1, lambda value: "=" in value),
    "--range": (2, str.isdigit),
    "--kwargs": (1, lambda value: value.startswith("{")),
}


class Pretended(Program):
    """Refuses words as ik_llama.cpp does."""

    def output(self, *words: str) -> str:
        if words[:1] == ("--help",):
            return HELP
        if words[:1] == ("--version",):
            return "version: 0 (55d3c05b)\nbuilt with cc\n"
        rest = list(words)
        while rest:
            word = rest.pop(0)
            word = word.replace("_", "-") if word.startswith("--") else word
            if word not in KNOWN:
                return f"error: unknown argument: {word}\nusage: llama-server [options]\n"
            number, likes = KNOWN[word]
            values, rest = rest[:number], rest[number:]
            if len(values) < number or not all(map(likes, values)):
                return f"error: invalid parameter for argument: {word}\n"
        return "ready\n"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, FlagSpec]:
    monkeypatch.setattr(print_flags, "Program", Pretended)
    # a linker lets `--range` be the end of another string
    data = b"\0--override-tensor\0x--range\0--kwargs\0--nothing\0LLAMA_ARG_THREADS\0-ot-n\0"
    (tmp_path / "llama-server").write_bytes(data)
    found = print_flags.program(str(tmp_path), "llama-server")
    assert found["version"] == "55d3c05b"
    assert found["variables"] == ["LLAMA_ARG_THREADS"]
    return {name: FlagSpec.model_validate(flag) for name, flag in found["flags"].items()}


def test_a_program_is_asked_for_flags_that_its_help_leaves_out(asked: dict[str, FlagSpec]) -> None:
    assert asked["--override-tensor"] == FlagSpec(takes="one", repeats=True)
    assert asked["--kwargs"].type == "json"
    assert asked["--range"].takes == "many"
    assert "--nothing" not in asked


def test_a_programs_help_is_not_believed(asked: dict[str, FlagSpec]) -> None:
    assert "--ghost" not in asked
    # its values are in the help, but the program takes any
    assert asked["--mode"].choices is None


def test_names_of_one_entry_are_one_flag(asked: dict[str, FlagSpec]) -> None:
    assert asked["--threads"] == FlagSpec(takes="one", type="integer", aliases=["-t"])
    assert asked["--flash-attn"].choices == ["on", "off"]
    assert asked["--verbose"].aliases == ["-v"]
    assert asked["--async-mode"].takes == "none"
    assert asked["--lora"].repeats
