"""The catalogue's answers, from what was found; and what its command refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.app.bump import LockFacts
from pipeline.app.catalogue import CARDS, CardFit, EngineCatalogue, EngineRelease
from pipeline.app.pages import Block, write_pages
from pipeline.images.gate.patches import PatchVerdict
from pipeline.serving.report.markup import is_report
from tests.unit.support import Command, make_checkout, make_wheel

FACTS = LockFacts(
    version="2", wheels=9, size_bytes=4_000_000_000, cuda="13.0", torch="2.13.0", triton="3.7.1"
)


def fitting(published: str, patched: str, *states: str, **more: Any) -> CardFit:
    verdicts = [
        {"patch": f"{n}.patch", "gate": "smem-x", "version": "2", "state": state, "message": "why"}
        for n, state in enumerate(states)
    ]
    body = {
        **{"arch": "sm_120", "limit_bytes": 101376, "published": published, "patched": patched},
        **{"published_bytes": {"smem-x": 106496}, "patched_bytes": {"smem-x": 71680}},
        **{"patches": [PatchVerdict.model_validate(each) for each in verdicts], **more},
    }
    return CardFit.model_validate(body)


@pytest.mark.parametrize(
    ("card", "answer"),
    [
        (fitting("passed", "passed"), "fits"),
        (fitting("accepted", "accepted", "superseded"), "fits"),
        (fitting("failed", "passed", "needed", "conflict"), "fits with 0.patch"),
        (fitting("failed", "failed", "weak", bad=["x: needs 9"]), "does not fit: x: needs 9"),
        (fitting("unknown", "unknown", bad=["x: gone"]), "unknown: x: gone"),
        # what could not be judged with a patch does not fit with it
        (fitting("failed", "unknown", "needed", bad=["x: died"]), "unknown with 0.patch: x: died"),
        # what an image accepts is still over the card's limit
        (
            fitting("accepted", "accepted", patched_bytes={"smem-x": 163840, "smem-y": 9}),
            "fits in part: not smem-x (163840 bytes)",
        ),
    ],
)
def test_a_card_gets_one_answer_and_unknown_never_fits(card: CardFit, answer: str) -> None:
    assert card.answer == answer


def test_the_page_says_what_was_judged_what_it_needs_and_what_could_not_be_locked(
    tmp_path: Path,
) -> None:
    one = fitting("failed", "passed", "needed")
    cards = [one.model_copy(update={"arch": arch}) for arch in CARDS]
    about = {"engine": "vllm", "image": "vllm", "facts": FACTS, "case_files": {"smem-x": 3}}
    good = EngineRelease.model_validate({**about, "version": "2", "cards": cards})
    lost = EngineRelease(
        engine="vllm", version="3", error="it cannot be locked: \x1b[2J | no wheel"
    )
    made = EngineCatalogue(made="2026-11-18", tool="sm120-pipeline", releases=[lost, good])
    files = write_pages(tmp_path / "page", "Title", "Made.", made.blocks)
    text, html = (path.read_text(encoding="utf-8") for path in files)
    assert "| vllm | 2 | fits with 0.patch | fits with 0.patch | 2.13.0 | 3.7.1 | 13.0 |" in text
    assert "smem-x of vllm (3 cases)" in text
    assert "| 106496 bytes | 71680 bytes | 101376 bytes |" in text
    # words of others neither end a cell nor steer a terminal
    assert "\\| no wheel" in text
    assert "\x1b" not in text + html
    assert "Releases that could not be locked or judged" in html


def test_a_page_of_tables_is_not_taken_for_a_report_with_data(tmp_path: Path) -> None:
    _, page = write_pages(tmp_path / "page", "Title", "Made.", [Block("<b>", ["<script>"])])
    assert not is_report(page.read_bytes()[:4096])
    assert b"<script>" not in page.read_bytes()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--engine", "nobody"), "--engine nobody: no image of this checkout has it"),
        (("--engine", "=="), "--engine ==: is not a requirement"),
        ((), "no release of an engine fits"),
    ],
)
def test_what_no_image_has_is_refused(
    sm120: Command, tmp_path: Path, words: tuple[str, ...], why: str
) -> None:
    make_checkout(tmp_path, [make_wheel(tmp_path / "mirror", "thing")])
    ended = sm120("catalogue", "make", *words)
    assert (ended.code, ended.error) == (10, "SpecInvalid")
    assert why in ended.err
    assert not (tmp_path / "catalogue.json").exists()
