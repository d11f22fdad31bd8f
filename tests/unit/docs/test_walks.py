"""The commands of the pages are run in their order, and say what the pages show."""

from __future__ import annotations

import pytest

from tests.docs.pages import Page, pages
from tests.docs.walks import RECORDED, World, same, typed, walk, walks

WALKS = [(page, name) for page in pages() for name in walks(page) if name != RECORDED]


@pytest.mark.usefixtures("no_slow_helpers")
@pytest.mark.parametrize(("page", "name"), WALKS, ids=[f"{p.name}-{name}" for p, name in WALKS])
def test_a_page_shows_what_its_commands_print(
    page: Page, name: str, request: pytest.FixtureRequest
) -> None:
    world: World = request.getfixturevalue(name)
    assert not (wrong := walk(page, name, world)), "\n".join(wrong)


def test_times_widths_and_random_digests_are_not_compared() -> None:
    shown = f"name  took\n----  -----\na     1.5 s\nsha256:{'a' * 64} and sha256:{'a' * 12}…\n"
    real = f"name  took\n----  ------\na     22 ms\nsha256:{'b' * 64} and sha256:{'b' * 12}…\n"
    assert same(shown, real)
    assert not same(shown, real.replace("b" * 12 + "…", "c" * 12 + "…"))
    assert not same(shown, real.replace("name", "image"))


def test_a_line_of_dots_stands_for_any_lines() -> None:
    assert same("first\n…\nlast\n", "first\n2\n3\nlast\n")
    assert same("├─ first\n│  ├─ …\n└─ last\n", "├─ first\n│  ├─ 2\n└─ last\n")
    assert not same("first\n…\nlast\n", "first\n2\n")
    assert not same("first\n…\nlast\n", "second\nlast\n")


def test_a_line_that_goes_on_is_one_command() -> None:
    (one, two) = typed("$ sm120 plan \\\n    tiny\nout\n\n$ echo $?\n0\n")
    assert (one.line, one.output) == ("sm120 plan tiny", "out\n\n")
    assert (two.line, two.output) == ("echo $?", "0\n")
    assert one.showing("more\n").output == "more\n\n"
