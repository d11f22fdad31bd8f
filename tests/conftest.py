"""Options for the whole test run, and which of its parts stay together when it is shared out."""

from __future__ import annotations

from typing import Any

import pytest

# these use one store, one image and one Docker daemon, which take minutes to fill
TOGETHER = frozenset(
    f"tests/integration/test_{name}.py"
    for name in (
        *("evidence_chain", "llama_image", "publish"),
        *("records", "reproducible", "tree_equals_pip"),
    )
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--big`: also the tests that need the engine images, and more of what is done by chance."""
    words = "test the engine images too (gigabytes), and kill twenty times where eight must do"
    parser.addoption("--big", action="store_true", help=words)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share out whole files, in the order of a run without helpers: the long ones come first."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False
    share_out = type("ShareOut", (LoadScopeScheduling,), {"_split_scope": part_of})
    return share_out(config, log)


def part_of(_: object, node: str) -> str:
    """The part of the run that a test belongs to; one process runs all of a part."""
    file = node.partition("::")[0]
    return "images" if file in TOGETHER else file
