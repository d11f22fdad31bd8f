"""Command lines split as Python's own argparse splits them."""

from __future__ import annotations

import argparse
from typing import NoReturn

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.images.engine.parser_flags import ParserFlags
from pipeline.images.engine.print_flags import describe_parser
from pipeline.serving.recipe.launch import Launch
from pipeline.serving.recipe.model import ContainerSpec
from pipeline.serving.recipe.parser import check_flags, split_command_line

WORDS = [
    *("--size", "--si", "--s", "--sizes", "--mode", "--mod", "--on", "--no-on", "--many", "--may"),
    *("-t", "-x", "--size=4", "--size=x", "--on=1", "--mode=fast", "--may=1", "--many=1", "--mo=x"),
    *("1", "-1", "-1.5", "1.5", "x", "fast", "slow", "a b", "-a b", "--size x", "-", "{}", "="),
]


class Refused(Exception):
    pass


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def real_parser() -> Parser:
    parser = Parser(add_help=False)
    parser.add_argument("-t", "--size", type=int)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--mode", choices=["fast", "slow"])
    parser.add_argument("--on", action=argparse.BooleanOptionalAction)
    parser.add_argument("--many", nargs="+")
    parser.add_argument("--may", nargs="?")
    return parser


FLAGS = ParserFlags.model_validate(
    {
        **describe_parser(real_parser()),
        "engine": "sglang",
        "version": "1",
        "image": "sglang",
        "tree": f"sha256:{'0' * 64}",
        "read_from": "a test",
        "syntax": "argparse",
    }
)


def is_refused(arguments: list[str]) -> bool:
    try:
        real_parser().parse_args(arguments)
    except Refused:
        return True
    return False


def refused(arguments: list[str]) -> list[str]:
    """What the check says, but for flags of which argparse takes the last."""
    launch = Launch(
        recipe="one",
        engine="sglang",
        image="sglang",
        program=["sglang"],
        arguments=arguments,
        environment={},
        mounts=[],
        port=1,
        cards=1,
        container=ContainerSpec(),
        model="m",
    )
    messages = [problem.message for problem in check_flags(launch, FLAGS)]
    return [m for m in messages if "twice" not in m and "contradicts" not in m]


@settings(deadline=None, max_examples=400)
@given(st.lists(st.sampled_from(WORDS), max_size=6))
def test_what_argparse_takes_passes_and_what_it_refuses_does_not(arguments: list[str]) -> None:
    assert bool(refused(arguments)) == is_refused(arguments)


@settings(deadline=None, max_examples=400)
@given(st.lists(st.sampled_from([*WORDS, "--size.x", "--", "--=", "-.", "--on.", "é"]), max_size=6))
def test_any_words_are_split_by_every_engines_way(arguments: list[str]) -> None:
    for syntax in ("argparse", "vllm", "llama"):
        flags = FLAGS.model_copy(update={"syntax": syntax})
        line = split_command_line(arguments, flags)
        known = [each for each in line.given if each.name]
        assert len(known) + len(line.plain) <= len(arguments)
        assert all(word in arguments for word in line.plain)
