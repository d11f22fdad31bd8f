"""Every command, with the foreign text that it shows: none of it acts on a terminal.

A command that is in no row fails the first test: whoever adds one writes what it shows of others.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from pipeline.cli.main import cli
from pipeline.cli.output import say_bytes
from pipeline.cli.verbs import VerbGroup, _paths
from pipeline.core.log import Screen
from tests.unit.cli.test_foreign_text import ACTS, ODD, require_harmless
from tests.unit.support import ROOT, Command

NAME = f"x{ODD}"
_LOG_LINE = "OutOfResources: shared memory, Required: 106496, Hardware limit: 101376"


class Row(NamedTuple):
    """Where the foreign text comes from, and words that feed it; none: it shows our own alone."""

    source: str
    words: tuple[str, ...] = ()


# {json} is a file of JSON, {text} a file of lines, {folder} a folder, {yaml} a file of YAML: each
# holds what steers a terminal, also in its name
_IMAGE = Row("a name that was typed", (NAME,))
_RECIPE = Row("a name that was typed", (NAME, "--recipes", "{folder}"))
_URL = Row("an address that was typed", (f"http://127.0.0.1:9/{ODD}",))
_FILE = Row("a file of others", ("{json}",))
_REFERENCE = Row("a reference that was typed", (f"127.0.0.1:9/{NAME}:v1",))
_OWN = Row("")
ROWS: Mapping[str, Row] = {
    "bench answer": _OWN,  # keys on stdin, of which it shows none
    "bench attest": Row("a run of others", ("{folder}",)),
    "bench compare": Row("results of others", ("{json}", "{json}")),
    "bench list": _OWN,
    "bench record": Row("lines of a log", ("{text}",)),
    "bench run": _URL,
    "build": _IMAGE,
    "bump": _IMAGE,
    "bundle": Row("a plan of others", ("{yaml}", "--output", NAME)),
    "catalogue make": Row("a name that was typed", ("--engine", NAME)),
    "completion": Row("a name that was typed", (NAME,)),
    "doctor": Row("lines of a log", ("{text}", "--no-facts")),
    "evidence attest": Row(
        "a file of others", ("{json}", "--type", "report", "--predicate", "{json}")
    ),
    "evidence audit": Row("a database of others", (NAME, "--database", "{folder}")),
    "evidence list-keys": Row("a trust file", ("--trust", "{yaml}")),
    "evidence make": _IMAGE,
    "evidence new-key": Row("a name that was typed", (NAME,)),
    "evidence sbom": _IMAGE,
    "evidence show-key": Row("a key of others", ("{text}",)),
    "evidence trust-key": Row("a key of others", ("{text}", "--name", NAME)),
    "evidence untrust-key": Row("a name that was typed", (NAME,)),
    "evidence verify": _FILE,
    "gate answer": _OWN,  # keys on stdin, of which it shows none
    "gate find": _IMAGE,
    "gate patches": _IMAGE,
    "gate run": _IMAGE,
    "gate show": _IMAGE,
    "gate tune": Row("a name that was typed", (NAME, ODD)),
    "host attest": _FILE,
    "host check": Row("facts of others", ("--facts", "{json}")),
    "host deploy": Row("a name that was typed", (NAME, "--inventory", "{yaml}")),
    "host doctor": Row("lines of a log", ("{text}", "--no-facts")),
    "host drift": _FILE,
    "host facts": Row("a folder of others", ("--root", "{folder}")),
    "host lock": Row(
        "a repository",
        ("--target", NAME, "--repository", f"http://127.0.0.1:9/{ODD}", "--keyring", "{text}"),
    ),
    "host outliers": Row("facts of others", ("{json}", "{json}")),
    "host provision": Row("an inventory", ("--inventory", NAME)),
    "host rollback": Row("an inventory", ("--inventory", NAME)),
    "host status": Row("an inventory", ("--inventory", NAME)),
    "host tune-nccl": Row("a folder that was typed", ("{text}", "--ranks", NAME)),
    "host verify": Row("an inventory", ("--inventory", NAME)),
    "image add-patch": Row("a diff of others", (NAME, "{text}", "--why", ODD)),
    "image answer": _OWN,  # the same
    "image build": _IMAGE,
    "image cat": Row("a name that was typed", (NAME, ODD)),
    "image collect": Row("a name that was typed", (NAME, "--output", "{folder}")),
    "image explain": Row("a name that was typed", (NAME, ODD)),
    "image export": Row("a name that was typed", (NAME, "{folder}")),
    "image files": _IMAGE,
    "image list": _OWN,
    "image load": _IMAGE,
    "image lock": _IMAGE,
    "image new": Row("a name that was typed", (NAME, "--base", NAME)),
    "image plan": _IMAGE,
    "image rebuild": _IMAGE,
    "image schema": _IMAGE,
    "image sources": _OWN,
    "image test": _IMAGE,
    "image warm": _IMAGE,
    "load": _IMAGE,
    "plan": _IMAGE,
    "publish": Row("a name that was typed", (NAME, f"127.0.0.1:9/{NAME}:v1")),
    "quality import": Row("a file of others", ("{json}",)),
    "quality run": _URL,
    "recipe attempts": Row("what was served before", ()),
    "recipe diff": Row("names that were typed", (NAME, NAME, "--recipes", "{folder}")),
    "recipe drift": Row(
        "a checkout of others", (NAME, "--recipes", "{folder}", "--upstream", "{folder}")
    ),
    "recipe flags": _IMAGE,
    "recipe import": Row("a file of others", ("{yaml}", "--name", NAME)),
    "recipe list": Row("recipes of others", ("--recipes", "{folder}")),
    "recipe logs": Row("a name that was typed", (NAME,)),
    "recipe render": Row("a name that was typed", (NAME, "--as", "docker")),
    "recipe serve": _RECIPE,
    "recipe show": _RECIPE,
    "recipe status": _OWN,
    "recipe stop": Row("a name that was typed", (NAME,)),
    "registry clean": Row("a registry", (f"127.0.0.1:9/{NAME}", "--keep", NAME)),
    "registry publish": Row("a name that was typed", (NAME, f"127.0.0.1:9/{NAME}:v1")),
    "registry pull": Row("a registry", (f"127.0.0.1:9/{NAME}:v1", "{folder}")),
    "registry tags": Row("a registry", (f"127.0.0.1:9/{NAME}",)),
    "render": Row("a name that was typed", (NAME, "--as", "docker")),
    "report": Row("results of others", ("{json}",)),
    "run": Row("a plan of others", ("{yaml}",)),
    "serve": _RECIPE,
    "smoke": _URL,
    "source build": Row("a name that was typed", (NAME, ODD)),
    "source export": Row("a name that was typed", (NAME, ODD, "{folder}")),
    "source list": _OWN,
    "source publish": Row("a name that was typed", (NAME, ODD, f"127.0.0.1:9/{NAME}")),
    "source lock": _IMAGE,
    "store check": _OWN,
    "store show": _OWN,
    "store trim": _OWN,
    "tune": _RECIPE,
    "unbundle": Row("a folder of others", ("{folder}",)),
    "verify": _FILE,
    "weights attest": Row("a folder of others", ("{folder}",)),
    "weights check-signature": Row("a folder", ("{folder}", "--public-key", "{text}")),
    "weights fetch": Row("a name that was typed", (NAME, "--output", "{folder}")),
    "weights fit": Row("a folder of others", ("{folder}",)),
    "weights image": Row("a folder of others", ("{folder}",)),
    "weights list": _OWN,
    "weights lock": Row("a name that was typed", (NAME,)),
    "weights scrub": Row("a folder of others", ("{folder}",)),
    "weights serve": Row("a folder of others", ("{folder}",)),
    "weights sign": Row("a folder of others", ("{folder}", "--key", "{text}")),
    "weights verify": Row("a folder of others", ("{folder}",)),
}


def test_every_command_is_in_the_table() -> None:
    assert isinstance(cli, VerbGroup)
    paths = {path.removeprefix("sm120 ") for path, _ in _paths(cli, "sm120")}
    groups = {path.rpartition(" ")[0] for path in paths} - {""}
    assert set(ROWS) == paths - groups


@pytest.mark.parametrize("path", [path for path, row in ROWS.items() if row.words])
def test_foreign_text_acts_on_no_terminal(sm120: Command, tmp_path: Path, path: str) -> None:
    folder = tmp_path / f"d{ODD}"
    folder.mkdir()
    body = {"name": ODD, "title": ODD, ODD: [ODD]}
    made = {"json": json.dumps(body, ensure_ascii=False), "text": f"{ODD} {_LOG_LINE} {ODD}\n"}
    made["yaml"] = f"keys: {json.dumps(ODD)}\n{json.dumps(ODD)}: 1\n"
    for kind, text in made.items():
        (folder / f"f{ODD}.{kind}").write_text(text)
    (folder / "config.json").write_text(made["json"])
    (folder / "manifest.json").write_text(made["json"])
    (folder / "odd.yaml").write_text(made["yaml"])
    release = folder / "proc" / "sys" / "kernel" / "osrelease"
    release.parent.mkdir(parents=True)
    release.write_text(f"6.1 {ODD}\n")
    assert sm120("evidence", "new-key", "me").code == 0
    files = {kind: str(folder / f"f{ODD}.{kind}") for kind in made}
    words = [files.get(w[1:-1], str(folder)) if w[:1] == "{" else w for w in ROWS[path].words]
    done = sm120("--checkout", ROOT, "--store", tmp_path / "store", *path.split(), *words)
    require_harmless(done)
    if path in ("recipe logs", "recipe stop") and done.error == "DockerUnavailable":
        pytest.skip("Docker does not run here, and it knows what is served.")
    # what is fed must be seen, or the row proves nothing
    assert any(mark in done.out + done.err for mark in ("x1b", "x9b", "u202e", "u001b")), done


@pytest.mark.parametrize("is_seen", [True, False])
def test_bytes_of_others_act_on_no_terminal_and_reach_a_program_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], is_seen: bool
) -> None:
    screen = Screen(sys.stdout)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(screen, "isatty", lambda: is_seen, raising=False)
    say_bytes(f"{ODD} 7 \xff".encode())
    shown = capfdbinary.readouterr().out
    assert (shown == f"{ODD} 7 \xff".encode()) is not is_seen
    assert (ACTS & set(shown.decode()) == set()) is is_seen


@pytest.mark.parametrize("command", ["recipe logs", "image cat", "evidence sbom"])
def test_commands_that_print_bytes_of_others_do_it_in_the_one_way(command: str) -> None:
    group, _, verb = command.partition(" ")
    inner = cli.commands[group]
    assert isinstance(inner, VerbGroup)
    found = inner.get_command(click.Context(inner), verb)
    assert found is not None
    assert found.callback is not None
    names = inspect.unwrap(found.callback).__code__.co_names
    assert "say_bytes" in names
    assert "buffer" not in names
