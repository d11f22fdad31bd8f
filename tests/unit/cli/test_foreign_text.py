"""Whatever a log, a recipe or a name holds, a command prints nothing that acts on a terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.support import ROOT, Command, Ended

ODD = "\x1b[2J\x1b]0;title\x07\x9b\u202e\u2066\x85\u2028\r"
ACTS = set(ODD) - set("[2J]0;title")
RECIPE = "deepseek-v4-flash-0731-vllm-4x"


def require_harmless(done: Ended) -> None:
    shown = done.out + done.err
    assert shown.strip()
    assert not ACTS & set(shown), ascii(shown)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe of somebody else's: every text of it, as far as the model lets it, is hostile."""
    body: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / f"{RECIPE}.yaml").read_text())
    for field in ("summary", "title", "source", "notes"):
        if isinstance(body.get(field), str):
            body[field] += ODD
    body["name"] = "odd"
    place = tmp_path / "recipes"
    place.mkdir()
    (place / "odd.yaml").write_text(yaml.safe_dump(body))
    return place


@pytest.mark.parametrize("more", [(), ("--json",)])
@pytest.mark.parametrize("words", [("recipe", "list"), ("recipe", "show", "odd"), ("recipes",)])
def test_recipes(
    sm120: Command, folder: Path, words: tuple[str, ...], more: tuple[str, ...]
) -> None:
    options = () if words == ("recipes",) else ("--recipes", str(folder))
    require_harmless(sm120("--checkout", ROOT, *words, *options, *more))


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_recognised_lines_of_a_log(sm120: Command, tmp_path: Path, more: tuple[str, ...]) -> None:
    log = tmp_path / f"a{ODD}.log"
    line = f"{ODD} OutOfResources: shared memory, Required: 106496, Hardware limit: 101376 {ODD}"
    log.write_text(line.replace("\r", "") + "\n")
    done = sm120("doctor", log, "--no-facts", *more)
    require_harmless(done)
    if more:
        (found,) = json.loads(done.out)
        assert "\x1b[2J" in found["seen"][0], "programs get the line as it is"


@pytest.mark.parametrize(
    "words",
    [
        ("plan", f"x{ODD}"),
        ("build", f"x{ODD}"),
        ("verify", f"x{ODD}"),
        ("smoke", f"http://{ODD}/"),
        ("bench", f"http://{ODD}/"),
        ("serve", f"x{ODD}"),
        ("render", f"x{ODD}"),
        ("weights", "fit", f"x{ODD}"),
        ("weights", "verify", f"x{ODD}"),
        ("gate", "run", f"x{ODD}"),
        ("gate", "find", f"x{ODD}"),
        ("source", "build", f"x{ODD}", "y"),
        ("host", "facts", "--root", f"x{ODD}"),
        ("report", f"x{ODD}"),
        ("image", "explain", f"x{ODD}", "y"),
        (f"x{ODD}",),
        ("plan", f"--x{ODD}"),
    ],
)
def test_names_that_are_quoted_in_errors(sm120: Command, words: tuple[str, ...]) -> None:
    done = sm120("--checkout", ROOT, *words)
    assert done.code
    require_harmless(done)
