"""The classes in pipeline.core.errors as the table of exit codes that the docs print."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.core.errors import PipelineError

_OWN = PipelineError.__module__


def error_families() -> list[type[PipelineError]]:
    """The classes that have an exit code of their own, in the order of their codes."""
    below = (kind for kind in PipelineError.__subclasses__() if kind.__module__ == _OWN)
    return sorted([PipelineError, *below], key=lambda family: family.exit_code)


def error_kinds(family: type[PipelineError]) -> list[type[PipelineError]]:
    """The errors of a family that are raised: those below it, or itself where there are none."""
    if family is PipelineError:
        return [family]
    return list(_below(family)) or [family]


def _below(kind: type[PipelineError]) -> Iterator[type[PipelineError]]:
    for child in kind.__subclasses__():
        # packages have private kinds, which they catch themselves
        if child.__module__ == _OWN:
            yield child
            yield from _below(child)
