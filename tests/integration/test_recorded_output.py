"""The output in the pages that needs the engine images is what the commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import Page, pages
from tests.docs.walks import RECORDED, RealWorld, walk, walks

PAGES = [page for page in pages() if RECORDED in walks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_recorded_output_is_still_what_comes_out(page: Page, big_store: Path) -> None:
    assert not (wrong := walk(page, RECORDED, RealWorld(big_store), write=False)), "\n".join(wrong)
