"""`sm120 report --paste`: one block for an issue tracker, without anything that names somebody."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from pipeline.artifacts.store.store import open_store
from pipeline.core.known import unknown
from pipeline.core.verdict import LadderVerdict
from pipeline.serving.recipe.launch import Overrides
from pipeline.serving.report.redact import Redactor
from pipeline.serving.report.text import PasteSection, render_paste
from pipeline.serving.serve.attempts import AttemptList, Begun, Ended, ServeOptions, new_id
from pipeline.serving.smoke.model import Check, RungResult, SmokePlan, SmokeResult
from tests.unit.bench.example_run import FOLDER
from tests.unit.hosts.machines import blackwell, facts
from tests.unit.support import Command

AT = "2026-11-01T08:00:00Z"
DIGEST = "sha256:" + "a" * 64
# what must not be pasted, by what the secret part of it is; all made up
SECRETS = {
    "HF_TOKEN=abcdefghij": "abcdefghij",
    "hf_QwErTyUiOpAsDfGhJkLz": "QwErTyUiOp",
    "--api-key planted-key-1": "planted-key-1",
    "Authorization: Bearer abc.def.ghi-planted": "ghi-planted",
    '{"api_key": "planted-key-2"}': "planted-key-2",
    "password=hunter22": "hunter22",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345": "0123456789abcdefghij",
    "nvapi-planted-0123456789": "planted-0123456789",
    "sk-planted0123456789": "planted0123456789",
    "http://carol:pa55word@gpu1.corp.example:8000/v1": "pa55word",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJwbGFudGVkIn0.c2lnbmVk": "eyJzdWIi",
    "AKIAIOSFODNN7PLANTED": "IOSFODNN7PLANTED",
    "k9Xf2LmQ8rTz4WvB7nYc1HjD5sGp3KeA6uRo0iMqZx": "k9Xf2LmQ8rTz4WvB7nYc1HjD5sGp3KeA6uRo0iMqZx",
    "/home/dagobert/models/k2": "dagobert",
    "file:///home/dagobert/run.log": "dagobert",
    "/Users/dagobert": "dagobert",
    "C:\\Users\\dagobert\\k2": "dagobert",
    "~dagobert/k2": "dagobert",
    "as Dagobert said": "agobert",
    "/mnt/customer-x/weights": "customer-x",
    "ssh carol@rig7": "rig7",
    "carol@corp.example": "carol",
    "http://rack7.corp.example:8000": "rack7",
    "rack7.internal refused": "rack7",
    "cannot reach rack7:29501": "rack7",
    "on secret-host-name": "secret-host-name",
    "10.1.2.3": "10.1.2.3",
    "[fe80::1ff:fe23:4567:890a%eth0]:80": "1ff:fe23",
    "::ffff:a01:203": "a01:203",
    "2001:db8:0:1:2:3:4:5": "2001:db8",
    "0a:1b:2c:3d:4e:5f": "1b:2c:3d",
    "0A-1B-2C-3D-4E-5F": "1B-2C-3D",
    "Serial Number: 1652924012345": "1652924012345",
    "<serial>1652924099999</serial>": "1652924099999",
    "S/N 1652924077777": "1652924077777",
    "GPU-3f0c1f3e-7a52-4b6e-9f0e-1c2d3e4f5a6b": "3f0c1f3e",
    "3f0c1f3e7a524b6e9f0e1c2d3e4f5a6b": "3f0c1f3e7a524b6e",
}
ALL = " ; ".join(SECRETS)


class Place(NamedTuple):
    """What a text is put into, before the block is made."""

    run: Path
    folder: Path
    store: Path

    def attempt(self, *, failure: str = "", log: str = "", model_path: str | None = None) -> None:
        attempts, name = AttemptList(self.store / "attempts"), new_id(datetime.fromisoformat(AT))
        options = ServeOptions(overrides=Overrides(model_path=model_path))
        begun = Begun(
            id=name,
            kind="serve",
            recipe="mine",
            recipe_digest=DIGEST,
            image="tiny",
            image_digest=DIGEST,
            options=options,
            host="carol@secret-host-name",
            at=AT,
        )
        attempts.add(begun)
        attempts.add(Ended(id=name, outcome="failed", failure=failure, seconds=1, at=AT))
        attempts.log_path(name).write_text(log)

    def recipe(self, **changes: object) -> None:
        body = {
            "name": "mine",
            "summary": "a recipe of a test",
            "backing": "unproved",
            "sources": {"ours": {"kind": "ours", "title": "this test", "why": "it needs one"}},
            "image": "tiny",
            "engine": "vllm",
            "model": {"repository": "org/brain", "name": "brain-1"},
            "hardware": {"cards": 0},
            "port": 8000,
            **changes,
        }
        (self.folder / "mine.yaml").write_text(yaml.safe_dump(body))

    def smoke(self, *, name: str = "one answer", message: str = "right") -> None:
        verdicts: tuple[LadderVerdict, ...] = ("passed", "failed", "skipped")
        checks = [
            Check(name=name, kind="mechanics", verdict=each, message=message) for each in verdicts
        ]
        rung = RungResult(
            name="first-answer", title="t", verdict="failed", checks=checks, seconds=1
        )
        result = SmokeResult(
            url="http://127.0.0.1:8000",
            model="brain-1",
            context_tokens=1,
            started=AT,
            verdict="failed",
            rungs=[rung],
            last_good=None,
            exchanges=1,
            seconds=1,
            plan=SmokePlan(),
        )
        (self.folder / "smoke.json").write_text(result.model_dump_json())

    def measured(self, old: str, text: str) -> None:
        path = self.run / "bench.json"
        data = path.read_text()
        assert old in data
        path.write_text(data.replace(old, old[:-1] + json.dumps(text)[1:-1] + '"', 1))

    def host(self, text: str) -> None:
        named = facts(blackwell()).model_copy(update={"host": "secret-host-name"})
        software = named.software.model_copy(update={"nccl": unknown(text), "podman": text})
        named = named.model_copy(update={"software": software})
        (self.folder / "facts.json").write_text(named.model_dump_json())


@pytest.fixture
def place(sm120: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr("socket.gethostname", lambda: "secret-host-name")
    made = Place(
        Path(shutil.copytree(FOLDER, tmp_path / "run")), tmp_path / "mine", open_store().root
    )
    made.folder.mkdir()
    made.recipe()
    made.smoke()
    made.attempt()
    made.host("nothing")
    return made


def _paste(sm120: Command, place: Place, *more: str | Path) -> str:
    given = ("--recipe", "mine", "--recipes", place.folder, "--smoke", place.folder, *more)
    ended = sm120(
        "report", place.run, "--paste", "--host-facts", place.folder / "facts.json", *given
    )
    assert ended.code == 0, ended.err
    return ended.out


PLACES: dict[str, Callable[[Place], None]] = {
    "the reason of a failed start": lambda place: place.attempt(failure=ALL),
    "a model that was named at the start": lambda place: place.attempt(model_path=ALL),
    "the recipe's environment": lambda place: place.recipe(environment={"ours": {"X": ALL}}),
    "the recipe's flags": lambda place: place.recipe(flags={"ours": {"extra": [ALL]}}),
    "the message of a check": lambda place: place.smoke(message=ALL),
    "the name of a check": lambda place: place.smoke(name=ALL),
    "facts of the host": lambda place: place.host(ALL),
    "the model that was measured": lambda place: place.measured('"model":"example-model"', ALL),
    "the reason of a void cell": lambda place: place.measured(
        '"1 of 6 requests failed: lost"', ALL
    ),
}


@pytest.mark.parametrize("where", PLACES)
def test_no_secret_is_pasted_wherever_it_stands(sm120: Command, place: Place, where: str) -> None:
    PLACES[where](place)
    text = _paste(sm120, place)
    assert [whole for whole, part in SECRETS.items() if part.lower() in text.lower()] == []
    # the text was there, and is not missing for another reason
    assert "redacted-" in text


@pytest.mark.parametrize("secret", SECRETS)
def test_each_kind_of_secret_is_found_by_itself(secret: str) -> None:
    redactor = Redactor(["secret-host-name"])
    redactor.learn(["/home/dagobert/x"])
    shown = render_paste("t", [PasteSection("part", [["row", secret]])], redactor)
    assert SECRETS[secret].lower() not in shown.lower()


def test_secrets_of_the_environment_are_left_out(
    sm120: Command, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_REGISTRY_PASSWORD", "plain-words-only")
    place.attempt(failure="401 for plain-words-only")
    assert "plain-words-only" not in _paste(sm120, place)


@pytest.mark.parametrize(
    "text",
    [
        "OutOfResources: shared memory, Required: 106496, Hardware limit: 101376",
        "_ZN7cutlass6kernelI35MainloopSm120TmaWarpSpecialized",
        "sglang/srt/layers/attention/triton_ops/extend_attention.py:412: error",
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
        "--max-model-len 131072 --kv-cache-dtype fp8_e4m3",
        "first token after 0.07 s, 27 tokens of a prompt",
        "token limit: cut at 4 and at 24 tokens",
        "0000:01:00.0 x16, 12:30:59",
        "/proc/driver/nvidia/version: No such file",
        "ubuntu 24.04, driver 580.105.08, vllm 0.32.0",
        "commit 0400c4ef554febc569d2bf0c9aa639b5c3877f9c",
    ],
)
def test_what_an_issue_needs_stays(text: str) -> None:
    assert Redactor(["ubuntu", "root"]).text(text) == text


def test_the_block_has_every_part(sm120: Command, place: Place) -> None:
    place.attempt(
        failure="SmokeFailed: wrong sums", log="INFO Using FLASHINFER attention backend\n"
    )
    text = _paste(sm120, place)
    for part in (
        "2x NVIDIA RTX PRO 6000",
        f"digest  {DIGEST}",
        "mine (unproved)",
        "Using FLASHINFER attention backend",
        "SmokeFailed: wrong sums",
        "checks  1 failed, 1 passed, 1 skipped",
        "failed  first-answer: one answer  right",
        "Output tok/s",
        "skipped, and why",
        "bench c2 is void",
        "smoke first-answer: one answer",
    ):
        assert part in text, part


def test_what_nobody_recorded_is_named_with_the_reason(sm120: Command) -> None:
    ended = sm120("report", FOLDER, "--paste", "--json")
    skipped = dict(ended.json["skipped"])
    assert set(skipped) >= {"host", "image", "recipe", "last starts", "smoke"}
    assert all(skipped.values())
    assert ended.json["text"].startswith("<details><summary>sm120 report: no recipe")


def test_without_a_run_it_is_about_the_last_start(sm120: Command, place: Place) -> None:
    text = sm120("report", "--paste", "--recipes", place.folder).out
    assert "sm120 report: mine, no smoke test" in text
    # the start was on another host: this machine's facts would be those of a wrong one
    assert "nobody recorded the server's machine" in text


def test_a_text_cannot_leave_the_block(sm120: Command, place: Place) -> None:
    place.attempt(failure="```\n</details> @somebody <script>````` \x1b[2J")
    text = _paste(sm120, place)
    fence = "`" * 6
    assert text.count(fence) == 2
    assert "\x1b" not in text
    inside = text.partition(f"{fence}text\n")[2].partition(f"\n{fence}\n")[0]
    assert "</details> @somebody <script>" in inside


def test_a_title_is_escaped() -> None:
    assert "\\<b\\>" in render_paste("<b>", [], Redactor())


def test_a_long_block_fits_an_issue_and_says_what_was_cut() -> None:
    sections = [PasteSection("part", [["x" * 5000, "y" * 5000]] * 100)] * 5
    text = render_paste("t", sections, Redactor())
    assert len(text) < 65_536
    assert "lines cut" in text
    few = render_paste("t", [PasteSection("part", [["a", "b"]] * 50)], Redactor())
    assert "… and 10 more" in few


def test_a_secret_is_redacted_before_its_cell_is_cut() -> None:
    text = render_paste(
        "t", [PasteSection("p", [["a", "x" * 395 + " hf_planted012345"]])], Redactor()
    )
    assert "hf_p" not in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--paste", "--output", "x.md"), "--paste prints"),
        (("--recipe", "mine"), "are for --paste"),
        (("--smoke", "x"), "are for --paste"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(
    sm120: Command, words: tuple[str, ...], reason: str
) -> None:
    ended = sm120("report", FOLDER, *words)
    assert ended.code == 2
    assert reason in ended.err


@pytest.mark.parametrize("content", ["{}", "not JSON", '{"url": 1}'])
def test_a_file_that_is_no_result_of_a_smoke_test_is_refused(
    sm120: Command, tmp_path: Path, content: str
) -> None:
    (tmp_path / "smoke.json").write_text(content)
    ended = sm120("report", "--paste", "--smoke", tmp_path)
    assert (ended.code, ended.error) == (10, "RunInvalid")
    assert "is no result of `sm120 smoke`" in ended.err


def test_a_misspelled_recipe_is_an_error_and_one_that_was_started_once_is_not(
    sm120: Command, place: Place
) -> None:
    ended = sm120("report", "--paste", "--recipe", "mien", "--recipes", place.folder)
    assert (ended.error, ended.code, ended.out) == ("UnknownRecipe", 41, "")
    (place.folder / "mine.yaml").unlink()
    kept = sm120("report", "--paste", "--recipe", "mine", "--recipes", place.folder)
    assert (kept.code, "it cannot be read" in kept.out) == (0, True)
