"""`sm120 bench RECIPE --on slurm`, over a stand-in for `srun` that prints what a node printed."""

from __future__ import annotations

import base64
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.app import bench_nodes
from pipeline.app.serve import serve_recipe
from pipeline.core.files import sha256_of_file
from pipeline.serving.bench.record import read_run
from tests.unit.cli.live_recipe import LiveRecipe, live_recipe
from tests.unit.support import Command, Ended

pytestmark = pytest.mark.usefixtures("checkout")
_SMALL = ("--concurrency", "1", "--requests", "2", "--input-tokens", "20", "--output-tokens", "5")
_FAST = ("--repeats", "1", "--no-self-test", "--allow-loops", "--no-speculation")
SRUN = """#!/bin/sh
for word in "$@"; do echo "$word"; done > {here}/words
echo called >> {here}/calls
cat > {here}/keys
echo '{{"node": "n7"}}'
cat {here}/reply
"""


class Rack(LiveRecipe):
    """The recipe, and a cluster of one program."""

    folder: Path
    out: Path
    patch: pytest.MonkeyPatch

    def bench(self, *more: str) -> Ended:
        words = ("--on", "slurm:gpu", "--weights", str(self.weights), "--output", str(self.out))
        return self.sm120("bench", "brainy", *words, *_SMALL, *_FAST, *more)

    @property
    def calls(self) -> int:
        file = self.folder / "calls"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def answered(self) -> list[dict[str, Any]]:
        """What a node prints for the last question; this machine is the node."""
        words = (self.folder / "words").read_text().splitlines()
        keys = (self.folder / "keys").read_text()
        with self.patch.context() as patch:
            patch.setattr("sys.stdin", io.StringIO(keys))
            done = self.sm120(*words[words.index("bench") :])
        assert done.code == 0, done.err
        return [json.loads(line) for line in done.out.splitlines()]

    def reply(self, lines: list[dict[str, Any]]) -> None:
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (self.folder / "reply").write_text(text)


@pytest.fixture
def rack(sm120: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Rack]:
    with live_recipe(sm120, monkeypatch, tmp_path, Rack) as rack:
        rack.folder, rack.out, rack.patch = tmp_path / "cluster", tmp_path / "results", monkeypatch
        rack.folder.mkdir()
        rack.reply([])
        for name, text in {"srun": SRUN, "scancel": "#!/bin/sh\n"}.items():
            (rack.folder / name).write_text(text.format(here=rack.folder))
            (rack.folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{rack.folder}:{os.environ['PATH']}")
        # the test's engine has neither weights nor flags
        skipped = ("weights", "flags")
        monkeypatch.setattr(
            bench_nodes, "serve_recipe", lambda w, r: serve_recipe(w, replace(r, skipped=skipped))
        )
        yield rack


def test_a_node_measures_and_the_run_is_kept_with_its_facts_and_not_asked_for_again(
    rack: Rack,
) -> None:
    done = rack.bench()
    assert (done.error, rack.calls) == ("SlurmUnavailable", 3)
    assert not rack.out.exists() or not any(rack.out.iterdir())
    lines = rack.answered()
    node = lines[0]["node"]
    # what it started, it stopped
    assert rack.sm120("recipe", "status", "--json").json == []
    rack.reply(lines)
    done = rack.bench()
    assert (done.code, rack.calls) == (0, 4), done.err
    assert "every request is in" in done.out
    run, facts = read_run(rack.out / "quick"), rack.out / f"host-{node}.json"
    assert run.inputs.host == sha256_of_file(facts)
    assert sorted(path.name for path in (rack.out / "quick").iterdir())[:1] == ["bench.json"]
    assert {path.name for path in rack.out.iterdir()} == {"quick", facts.name}
    assert {"--exclusive", "--partition=gpu"} <= {*(rack.folder / "words").read_text().split()}
    again = rack.bench("--json")
    assert (again.code, rack.calls) == (0, 4)
    assert again.json[0]["nonce"] == run.nonce
    # another question is another run
    other = rack.bench("--requests", "3")
    assert (other.error, rack.calls) == ("RunInvalid", 4)
    assert "holds something else than a whole run of this" in other.err


Files = dict[str, str]


def repacked(files: Files, name: str, change: Callable[[bytes], bytes]) -> None:
    data = change(zlib.decompress(base64.b64decode(files[name])))
    files[name] = base64.b64encode(zlib.compress(data)).decode()


def faster(data: bytes) -> bytes:
    run = json.loads(data)
    run["cells"][0]["trials"][0]["metrics"]["output_tok_s"] *= 2
    return json.dumps(run).encode()


def of_another_recipe(data: bytes) -> bytes:
    run = json.loads(data)
    run["inputs"]["recipe"] = f"sha256:{'1' * 64}"
    return json.dumps(run).encode()


def stopped(data: bytes) -> bytes:
    return json.dumps({**json.loads(data), "state": "partial"}).encode()


def of_another_host(files: Files) -> None:
    repacked(files, next(name for name in files if "host-" in name), lambda data: data + b" ")


def escape(files: Files) -> None:
    files["../bench.json"] = files["bench.json"]


def cut(files: Files) -> None:
    files["requests.jsonl"] = files["requests.jsonl"][:40]


WRONG: dict[str, Callable[[Files], None]] = {
    "a number that does not follow": lambda files: repacked(files, "bench.json", faster),
    "another recipe": lambda files: repacked(files, "bench.json", of_another_recipe),
    "half a run": lambda files: repacked(files, "bench.json", stopped),
    "a request left out": lambda files: repacked(files, "requests.jsonl", lambda data: data[:-5]),
    "facts of another host": of_another_host,
    "a path": escape,
    "a file cut off": cut,
}


def test_a_run_that_cannot_be_trusted_is_refused_and_leaves_nothing(rack: Rack) -> None:
    assert rack.bench().error == "SlurmUnavailable"
    good = rack.answered()
    for what, spoil in WRONG.items():
        lines = json.loads(json.dumps(good))
        spoil(lines[-1]["answer"]["files"])
        rack.reply(lines)
        done = rack.bench()
        assert done.error == "SlurmUnavailable", what
        assert not (rack.out / "quick").exists(), what
    rack.reply(good)
    assert rack.bench().code == 0


def test_an_address_and_what_is_about_other_hosts_are_refused(rack: Rack, tmp_path: Path) -> None:
    at = rack.sm120("bench", "http://127.0.0.1:1", "--on", "slurm")
    assert (at.code, "an address names its host itself" in at.err) == (2, True)
    (tmp_path / "facts.json").write_text("{}")
    for words in (("--host-facts", str(tmp_path / "facts.json")), ("-i", "hosts.yml")):
        done = rack.bench(*words)
        assert (done.code, "nodes send their own facts" in done.err) == (2, True)
    alone = rack.sm120("bench", "brainy", "--chunk", "2")
    assert alone.error == "SpecInvalid"
    assert rack.calls == 0
