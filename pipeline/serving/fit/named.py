"""A model by the name that a user wrote, and the names nearest to one that is unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pipeline.core.errors import WeightsUnknown, did_you_mean
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.fit.facts import shipped_repositories
from pipeline.weights.model import WeightsSpec, read_spec, spec_names

_MOST_NAMES = 3
_LIKE = 0.6  # difflib's own limit
_LEAST_CHARS = 4  # of a part that is looked for inside of names: `a3b` is in many


def named_spec(checkout: Checkout, name: str) -> WeightsSpec:
    """The spec of a name; the error for an unknown name suggests the nearest ones."""
    try:
        return read_spec(checkout, name)
    except WeightsUnknown as error:
        near = nearest(name, [*spec_names(checkout), *shipped_repositories()])
        raise WeightsUnknown(str(error), f"{did_you_mean(near)}{error.hint}") from error


def nearest(text: str, known: Iterable[str]) -> list[str]:
    """The known models that look most like what was typed, the nearest first."""
    # without the organisation, which people leave out, and in any letter case
    by_model: dict[str, list[str]] = {}
    for name in known:
        by_model.setdefault(_model(name), []).append(name)
    typed = _model(text)
    near = difflib.get_close_matches(typed, by_model, n=_MOST_NAMES, cutoff=_LIKE)
    inside = [model for model in by_model if len(typed) >= _LEAST_CHARS and typed in model]
    names = [name for model in dict.fromkeys([*near, *inside]) for name in by_model[model]]
    return names[:_MOST_NAMES]


def _model(text: str) -> str:
    return text.partition("@")[0].rstrip("/").rpartition("/")[2].casefold()
