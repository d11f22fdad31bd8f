"""Every command explains itself: a sentence in the list, a page of help, completion in a shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete

from pipeline.cli.main import cli
from pipeline.cli.verbs import GROUPS, VerbGroup
from tests.docs.commands import complaint
from tests.unit.support import ROOT, Command

WIDTH, HEIGHT = 80, 30
TEXTS = {".py", ".yml", ".yaml", ".j2", ".md", ".sh"}


def paths(group: VerbGroup = cli, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command, without loading any."""
    for name in group.verbs:
        yield (*before, name)
        inner = group.commands.get(name)
        if isinstance(inner, VerbGroup):
            yield from paths(inner, (*before, name))


def command_at(path: tuple[str, ...]) -> click.Command:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        inner = command.get_command(click.Context(command), name)
        assert inner is not None
        command = inner
    return command


PATHS = list(paths())


@pytest.mark.parametrize("path", [(), *PATHS], ids=" ".join)
def test_help_begins_with_a_sentence_and_no_line_is_wider_than_a_terminal(
    sm120: Command, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...]
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    ended = sm120(*path, "--help")
    assert ended.code == 0
    text = command_at(path).help or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    assert paragraph.endswith(".")
    assert 20 < len(paragraph.split(". ")[0]) < 100
    assert paragraph[:40] in " ".join(ended.out.split())
    assert [line for line in ended.out.splitlines() if len(line) > WIDTH] == []


@pytest.mark.parametrize("path", [(), *PATHS], ids=" ".join)
def test_every_option_has_help_in_a_whole_phrase(path: tuple[str, ...]) -> None:
    options = [p for p in command_at(path).params if isinstance(p, click.Option)]
    helps = {option.name: (option.help or "").strip() for option in options}
    assert [n for n, text in helps.items() if not text[:1].isupper()] == []
    assert [name for name, text in helps.items() if not text.endswith(".")] == []


@pytest.mark.parametrize("group", [cli, *GROUPS], ids=lambda group: group.name)
def test_a_list_of_commands_fits_a_screen_and_no_sentence_is_cut(
    sm120: Command, monkeypatch: pytest.MonkeyPatch, group: VerbGroup
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    path = () if group is cli else (str(group.name),)
    lines = sm120(*path, "--help").out.splitlines()
    for name, verb in group.verbs.items():
        assert verb.summary.endswith(".")
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert line.endswith(verb.summary)
    first = next(n for n, line in enumerate(lines) if line.endswith(":") and "ommands" in line)
    assert len(lines) - first <= HEIGHT


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("biuld", "`sm120 build`"),
        ("image tets", "`sm120 image test`"),
        ("wieghts fetch", "`sm120 weights`"),
        ("Verify", "`sm120 verify`"),
        # it lives in another group, and is not only near to something here
        ("fetch", "`sm120 weights fetch`"),
        ("pull", "`sm120 registry pull`"),
        ("image pull", "`sm120 registry pull`"),
        ("image trust", "`sm120 evidence trust-key`"),
        # two commands, although one of them stands in two groups
        ("gate publish", "`sm120 publish` or `sm120 source publish`"),
        (
            "lock",
            "`sm120 host lock` or `sm120 image lock` or `sm120 source lock`"
            " or `sm120 weights lock`",
        ),
        ("help", "`sm120 --help`"),
        ("image help", "`sm120 image --help`"),
    ],
)
def test_a_mistyped_command_is_answered_with_the_nearest_one(
    sm120: Command, typed: str, meant: str
) -> None:
    ended = sm120(*typed.split())
    assert ended.code == 2
    assert ended.err.rstrip().endswith(f"Did you mean {meant}?")


@pytest.mark.parametrize("typed", ["xyzzy", "image xyzzy"])
def test_a_word_that_is_near_to_no_command_gets_no_suggestion(sm120: Command, typed: str) -> None:
    ended = sm120(*typed.split())
    assert (ended.code, "Did you mean" in ended.err) == (2, False)
    assert "No such command 'xyzzy'." in ended.err


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_command_is_found_again_with_two_letters_swapped(
    sm120: Command, path: tuple[str, ...]
) -> None:
    *before, name = path
    swapped = name[:-2] + name[-1] + name[-2]
    if before in (["bench"], ["quality"]) or swapped == name:
        return  # what is no verb of these is a recipe
    assert f"`sm120 {' '.join(path)}`" in sm120(*before, swapped).err


def test_a_mistyped_option_is_answered_with_the_nearest_one(sm120: Command) -> None:
    assert "Did you mean '--platform'?" in sm120("build", "x", "--platfrom", "host").err
    assert "Did you mean '--store'?" in sm120("--sotre", "x", "plan").err


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("plan --store x", "It stands before the command: `sm120 --store PATH plan`."),
        ("image list --debug", "It stands before the command: `sm120 --debug image list`."),
        ("build vllm -platform host", "No such option '-platform'. Did you mean '--platform'?"),
        ("build vllm -platform=host", "No such option '-platform'. Did you mean '--platform'?"),
        ("-V", "No such option '-V'. Did you mean '--version'?"),
        ("build -x", "No such option '-x'."),
        ("--xyzzy", "No such option '--xyzzy'."),
    ],
)
def test_an_option_in_another_place_or_with_one_dash_is_explained(
    sm120: Command, typed: str, answer: str
) -> None:
    ended = sm120(*typed.split())
    assert ended.code == 2
    assert ended.err.rstrip().endswith(answer)


@pytest.mark.parametrize("words", [["comapre", "a", "b"], ["lst"], ["lsit", "--workload"]])
def test_a_mistyped_verb_where_one_may_be_left_out_is_named_too(
    sm120: Command, words: list[str]
) -> None:
    verb = "compare" if "a" in words else "list"
    ended = sm120("--checkout", ROOT, "bench", *words)
    assert f"Did you mean `sm120 bench {verb}`?" in ended.err
    assert ".." not in ended.err.replace("...", "")


@pytest.mark.parametrize("words", [["xyzzy"], ["tiny-cpu", "x", "y"], ["run", "a", "b"]])
def test_what_is_near_to_no_verb_of_the_bench_is_taken_for_a_recipe(
    sm120: Command, words: list[str]
) -> None:
    assert "Did you mean" not in sm120("--checkout", ROOT, "bench", *words).err


def test_one_word_names_one_thing() -> None:
    """The same option has the same meaning, and help, wherever it stands."""
    helps: dict[str, set[str]] = {}
    for path in PATHS:
        for option in command_at(path).params:
            if isinstance(option, click.Option):
                helps.setdefault(option.opts[-1], set()).add(option.help or "")
    shared = ("--json", "--offline", "--mirror", "--platform", "--key-path", "--trust", "--limit")
    assert {name: helps[name] for name in shared if len(helps.get(name, ())) > 2} == {}
    gone = {"--really", "--forks", "--only-diff", "--numerics", "--most-gb", "--force"}
    assert gone & set(helps) == set()


@pytest.mark.parametrize(
    ("args", "incomplete", "expected"),
    [
        ([], "we", ["weights"]),
        ([], "p", ["plan", "publish"]),
        (["weights"], "ve", ["verify"]),
        (["image", "schema"], "im", ["image"]),
        (["build"], "--off", ["--offline"]),
    ],
)
def test_a_shell_completes_commands_options_and_choices(
    args: list[str], incomplete: str, expected: list[str]
) -> None:
    shell = BashComplete(cli, {}, "sm120", "_SM120_COMPLETE")
    assert [item.value for item in shell.get_completions(args, incomplete)] == expected


@pytest.mark.parametrize(
    ("typed", "offered"), [("host ", "provision"), ("serve tiny-c", "tiny-cpu")]
)
def test_completion_loads_nothing_that_is_slow(typed: str, offered: str) -> None:
    code = "import sys; from pipeline.cli.main import main; sys.argv = ['sm120']; main()"
    words = {"COMP_WORDS": f"sm120 {typed}", "COMP_CWORD": "2"}
    names = {"_SM120_COMPLETE": "bash_complete", **words}
    watch = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    done = subprocess.run(
        [sys.executable, "-c", f"{watch}; {code}"],
        env={**os.environ, **names},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"plain,{offered}" in done.stdout.splitlines()
    assert "pydantic" not in done.stderr.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_a_shell_is_printed(sm120: Command, shell: str) -> None:
    script = sm120("completion", shell).out
    assert f"_SM120_COMPLETE={shell}_complete" in script


def named_commands() -> list[str]:
    """What messages, hints, roles and shipped files name in backquotes."""
    files = subprocess.run(
        ["git", "ls-files", "pipeline", "ansible", "images", "lockfiles", "noxfile.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    texts = [(ROOT / f).read_text("utf-8") for f in files if Path(f).suffix in TEXTS]
    # a string may go on in the next line
    joined = [re.sub(r'"\n\s+f?"', "", text) for text in texts]
    commands = {one for text in joined for one in re.findall(r"`(sm120 [^`\n]+)`", text)}
    return sorted(commands - {"sm120 GROUP --help"})


@pytest.mark.parametrize("command", named_commands())
def test_a_command_that_a_message_names_exists(command: str) -> None:
    assert complaint(re.sub(r"\{[^}]*\}+", "X", command).split()) == ""


@pytest.mark.parametrize(
    ("words", "now"),
    [
        (("weights", "fetch", "tiny", "--to", "w"), "--output"),
        (("bench", "run", "http://127.0.0.1:9", "--out", "w"), "--output"),
        (("bench", "run", "http://127.0.0.1:9", "--input", "9"), "--input-tokens"),
        (("evidence", "trust-key", "README.md", "--to", "w"), "--trust"),
        (("evidence", "untrust-key", "me", "--from", "w"), "--trust"),
        (("serve", "tiny-cpu", "--engine", "podman"), "--runtime"),
        (("weights", "fit", "kimi-k2.6", "--gpus", "8"), "--gpu-count"),
    ],
)
def test_an_option_of_an_earlier_version_is_answered_with_its_name_of_today(
    sm120: Command, words: tuple[str, ...], now: str
) -> None:
    ended = sm120(*words)
    assert ended.code == 2
    assert ended.err.rstrip().endswith(f"No such option {words[-2]!r}: it is {now!r} now.")
