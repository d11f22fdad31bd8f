"""Damaged captures, many of them: facts may become unknown, but nothing may break."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest

from pipeline.core.errors import RecordInvalid
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.facts.redact import redact_capture
from pipeline.hosts.facts.source import Capture, CapturedCommand, CapturedFile
from pipeline.hosts.facts.summary import summarise
from pipeline.hosts.rules.judge import judge_rules
from tests.unit.hosts.machines import ACS_ON, blackwell, facts, h200

_NOISE = ["\x00", "ÿ", "-1", "9" * 30, "\n\n", "N/A", "[Unknown Error]", "<", "&x;", ":", "=", '"']


def damaged(text: str, chance: random.Random) -> str:
    """One of the ways in which text gets lost on its way."""
    a, b = sorted(chance.randrange(len(text) + 1) for _ in range(2))
    lines = text.splitlines(keepends=True)
    chance.shuffle(lines)
    ways = [text[:a], text[a:b], text[:a] + chance.choice(_NOISE) + text[a:], "".join(lines)]
    return chance.choice([*ways, "", text + text])


def damaged_machine(capture: Capture, chance: random.Random) -> Capture:
    files, commands = dict(capture.files), dict(capture.commands)
    for path in chance.sample(sorted(files), min(8, len(files))):
        output = files[path]
        if output.text is not None:
            files[path] = CapturedFile(text=damaged(output.text, chance))
        elif output.base64 is not None:
            files[path] = CapturedFile(base64=damaged(output.base64, chance))
    for name in chance.sample(sorted(commands), 4):
        code = chance.choice([0, 0, 0, 1, -9])
        commands[name] = CapturedCommand(code=code, out=damaged(commands[name].out, chance))
    return capture.model_copy(update={"files": files, "commands": commands})


@pytest.mark.parametrize("seed", range(25))
def test_a_damaged_machine_is_still_judged(seed: int) -> None:
    chance = random.Random(seed)
    capture = damaged_machine(chance.choice([h200(), blackwell(4, ACS_ON, "DMA")]), chance)
    result = facts(capture)
    assert HostFacts.model_validate_json(result.model_dump_json()) == result
    assert judge_rules(result, "13.2")
    # a value that no statement can carry is refused, not passed on
    with suppress(RecordInvalid):
        assert summarise(result)
    assert facts(redact_capture(capture))
