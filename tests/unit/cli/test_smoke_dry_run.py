"""`sm120 smoke --dry-run`, over the recipes of this checkout and servers that nobody asks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.app import serve as on_host
from pipeline.artifacts.store.store import default_root
from pipeline.serving.smoke import client
from pipeline.serving.smoke.ladder import LADDER
from tests.unit.support import ROOT, Command

SMOKE = ("--checkout", ROOT, "smoke")
URL = "http://gpu1:8000"


@pytest.fixture(autouse=True)
def nothing_is_touched(
    sm120: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No container engine is looked for, no server is asked, and no file appears."""

    def touched(*args: object, **options: object) -> None:
        raise AssertionError("a dry run touches nothing")

    for name in ("find_engine", "find_engines", "open_tunnel"):
        monkeypatch.setattr(on_host, name, touched)
    monkeypatch.setattr(client.Client, "_exchange", touched)
    before = sorted(tmp_path.rglob("*"))
    yield
    assert sorted(tmp_path.rglob("*")) == before
    assert not default_root().exists()


def plan(sm120: Command, *words: str) -> Any:
    return sm120(*SMOKE, *words, "--dry-run", "--json").json


def checks(planned: Any, state: str) -> list[str]:
    return [row["check"] for row in planned["checks"] if row["plan"] == state]


def test_every_rung_is_named_with_what_is_skipped_and_why(sm120: Command) -> None:
    planned = plan(sm120, "tiny-cpu", "--serve")
    assert [*dict.fromkeys(row["rung"] for row in planned["checks"])] == [r.name for r in LADDER]
    assert {"8 at once", "restart"} <= set(checks(planned, "asked"))
    assert {"arithmetic", "draft model"} <= set(checks(planned, "skipped"))
    assert "context" in checks(planned, "depends")
    text = sm120(*SMOKE, "tiny-cpu", "--serve", "--dry-run").out
    assert "the model is declared tiny: it can only recite" in text
    assert "tiny-cpu would be started first and stopped last" in text
    assert "Nothing was asked of tiny-cpu, and nothing was written" in text


def test_a_dry_run_is_of_what_was_chosen(sm120: Command) -> None:
    planned = plan(sm120, URL, "--up-to", "streams", "--streams", "1,3", "--no-tools")
    assert [r["check"] for r in planned["checks"] if "at once" in r["check"]] == [
        "1 at once",
        "3 at once",
        "tool calls at once",
    ]
    assert "tool calls at once" in checks(planned, "skipped")
    known = plan(sm120, URL, "--context", "4096")
    assert {"context 1024", "context 2048", "context 4096"} <= set(checks(known, "asked"))
    assert checks(known, "depends") == ["pictures"]
    assert "restart" in checks(plan(sm120, "tiny-cpu"), "skipped")
    assert "restart" in checks(plan(sm120, "tiny-cpu", "--restart"), "asked")


def test_drafts_are_tried_where_the_recipe_is_served_with_them(sm120: Command) -> None:
    drafting = plan(sm120, "qwen38-flash-next-nvfp4-sglang-1x-mtp", "--restart")
    wanted = {"draft model", "the baseline's answers", "streams with drafts"}
    assert wanted <= set(checks(drafting, "asked"))
    assert wanted <= set(checks(plan(sm120, "kimi-k26-vllm-8x", "--restart"), "skipped"))


def test_pictures_come_after_all_text_and_text_only_leaves_them_out(sm120: Command) -> None:
    planned = plan(sm120, "kimi-k26-vllm-8x", "--serve")
    asked = checks(planned, "asked")
    assert "pictures" in asked
    text = {"arithmetic", "scenarios", "64 at once", "context 65536", "pressure", "restart"}
    assert text <= set(asked[: asked.index("pictures")])
    without = plan(sm120, "kimi-k26-vllm-8x", "--serve", "--text-only")
    (row,) = [row for row in without["checks"] if row["check"] == "pictures"]
    assert (row["plan"], row["why"]) == ("skipped", "--text-only")


def test_what_would_be_kept_or_recorded_is_named(sm120: Command) -> None:
    text = sm120(*SMOKE, URL, "--dry-run", "--keep", "kept").out
    assert "The result would be in kept" in text
    text = sm120(*SMOKE, URL, "--dry-run", "--record", "base.json").out
    assert "Then 30 greedy answers would be recorded in base.json" in text
    assert "streams" not in text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("ftp://gpu1",), "InputInvalid"),
        (("tiny-cpuu",), "UnknownRecipe"),
        ((URL, "--recipe", "nobody"), "UnknownRecipe"),
        ((URL, "--serve"), ""),
        ((URL, "--up-to", "stream"), ""),
        (("tiny-cpu", "--on", "rig1", "--serve", "--weights", "here"), ""),
    ],
)
def test_what_a_climb_refuses_is_refused(
    sm120: Command, words: tuple[str, ...], error: str
) -> None:
    ended = sm120(*SMOKE, *words, "--dry-run")
    assert ended.code != 0
    # a mistake in the words themselves is click's
    assert (ended.error, error or ended.code) == (error, error or 2)


def test_another_host_is_not_reached(sm120: Command) -> None:
    assert "restart" in checks(plan(sm120, "tiny-cpu", "--on", "rig1", "--restart"), "asked")
