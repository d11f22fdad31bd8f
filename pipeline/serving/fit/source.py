"""What a user names: a spec, a repository, a folder, a config.json or a GGUF file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from pipeline.core.errors import (
    ModelUnreadable,
    NoCheckout,
    OfflineMiss,
    SourceUnreachable,
    SpecInvalid,
    WeightsUnknown,
    did_you_mean,
)
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.fit.config import CONFIG_FILE, QUANT_FILE, parse_config, read_model_config
from pipeline.serving.fit.facts import fact_of, from_recipe, recipe_of, shipped_repositories
from pipeline.serving.fit.gguf import GgufModel, gguf_parts, read_gguf
from pipeline.serving.fit.parts import tensor_parts
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.fit.units import gib
from pipeline.weights import model as weights
from pipeline.weights.place import cache_name, find_places, in_hub_cache, snapshots_in, user_cache

_TAKES = (
    "Name a folder, a config.json or a .gguf file; a set of `sm120 weights list`; or a model of the"
    " Hub as ORG/MODEL."
)
_GGUF = "Of GGUF files, fetch one set (`sm120 weights fetch`) and name its .gguf file."
_OWN_COPY = "A copy of the config.json in which you correct that can be named instead."
# some repositories hold the weights a second time, under the name of another loader
_SHARD = re.compile(r"(?!consolidated)[^/]*\.safetensors")
_TOLERATED = 0.03  # of the files: small parts that are not counted, headers
_MOST_NAMES = 3
_LIKE = 0.6  # difflib's own limit
_LEAST_CHARS = 4  # of a part that is looked for inside of names: `a3b` is in many


@dataclass(frozen=True)
class ModelSource:
    """A model, where its numbers come from, and what it takes on a disk."""

    name: str
    model: Architecture | GgufModel
    origin: str
    disk_bytes: int
    is_estimate: bool  # of the disk: summed from the architecture, not from files or a lock


@dataclass(frozen=True)
class HubModel:
    """A commit of a repository on the Hub, and a function that reads a small file of it."""

    repository: str
    commit: str
    files: list[weights.FilePin]
    read: Callable[[weights.FilePin], bytes]


AskHub: TypeAlias = Callable[[str, str], HubModel]  # of a repository at a revision


def find_source(
    text: str, checkout: Callable[[], Checkout], ask_hub: AskHub | None = None
) -> ModelSource:
    """Reads a path that exists, else a repository of the Hub, else the name of a spec."""
    # as a path it would be the current folder
    if not text.strip():
        raise WeightsUnknown("the name of the model is empty", _TAKES)
    path = Path(text)
    if path.is_file():
        return _from_file(path)
    if path.is_dir():
        return _from_folder(path)
    if ask_hub is not None and weights.is_reference(text):
        try:
            named = weights.weights_spec(text)
        except SpecInvalid:  # a path that does not exist, or a mistake that is reported as one
            if "://" in text:
                raise
        else:
            return _from_reference(named.repository, named.revision, ask_hub)
    # meant as a path: an answer about an unknown spec would mislead
    if "/" in text or text.endswith((".json", ".gguf")):
        raise WeightsUnknown(f"{text}: there is no such file or folder", _TAKES)
    try:
        root = checkout()
    except NoCheckout as error:  # models of the Hub need none
        near = did_you_mean(nearest_models(text, shipped_repositories()))
        raise NoCheckout(
            f"{text}: is no file or folder, and there is no checkout here that has specs",
            f"{near}Models of the Hub are named ORG/MODEL and need no checkout. {error.hint}",
        ) from error
    spec = named_spec(root, text)
    lock = (
        weights.current_weights_lock(root, text) if weights.lock_path(root, text).exists() else None
    )
    model: Architecture | GgufModel | None = None
    if spec.format == "gguf":
        if shipped := recipe_of(spec.repository, spec.quant):
            model = from_recipe(shipped[0].architecture(), shipped[1])
    elif known := fact_of(spec.repository):
        model = known.architecture()
    elif ask_hub is not None:
        revision = lock.commit if lock else spec.revision
        return _from_reference(spec.repository, revision, ask_hub)
    if model is None:
        raise ModelUnreadable(
            f"{text}: nothing about {spec.repository} is shipped",
            "Fetch it (`sm120 weights fetch`), then name its folder, config.json or .gguf file.",
        )
    origin = f"shipped facts about {spec.repository}, not the weights themselves"
    if lock is not None:
        return ModelSource(text, model, origin, lock.size_bytes, False)
    size = model.n_bytes if isinstance(model, GgufModel) else _file_bytes(model)
    return ModelSource(text, model, origin, size, True)


def _from_file(path: Path) -> ModelSource:
    if path.suffix == ".gguf":
        size = sum(part.stat().st_size for part in gguf_parts(path))
        return ModelSource(path.name, read_gguf(path), "the head of its GGUF files", size, False)
    if path.suffix == ".json":
        return _from_config(path)
    raise ModelUnreadable(f"{path}: is neither a config.json nor a .gguf file", _TAKES)


def _from_config(path: Path) -> ModelSource:
    model = read_model_config(path)
    files = path.parent.glob("*.safetensors")
    shards = [file.stat().st_size for file in files if _SHARD.fullmatch(file.name)]
    # config.json alone is enough: people judge a model before they fetch it
    size = sum(shards) or _file_bytes(model)
    # a model in a Hub cache is known by its repository, not by its commit
    cached = in_hub_cache(path.parent)
    name = cached.repository if cached else path.parent.name or path.name
    return ModelSource(name, _beside_files(model, size), f"{path.name}", size, not shards)


def _from_folder(folder: Path) -> ModelSource:
    if (folder / CONFIG_FILE).is_file():
        return _from_config(folder / CONFIG_FILE)
    ggufs = sorted([*folder.glob("*.gguf"), *folder.glob("*/*.gguf")])
    # mmproj is llama.cpp's name for a vision tower beside the model
    models = {gguf_parts(path)[0] for path in ggufs if not path.name.startswith("mmproj")}
    if len(models) == 1:
        return _from_file(models.pop())
    if models:
        names = ", ".join(sorted(path.name for path in models))
        raise ModelUnreadable(f"{folder}: holds several models ({names})", "Name one of them.")
    # a Hub cache: its only snapshot, or the only one that is locked
    cache = in_hub_cache(folder)
    snapshots = [] if cache and cache.commit else snapshots_in(folder)
    if len(snapshots) > 1:
        with suppress(WeightsUnknown):
            snapshots = [place.snapshot for place in find_places(folder)] or snapshots
    if not snapshots:
        raise WeightsUnknown(f"{folder}: holds no config.json and no .gguf file", _TAKES)
    if len(snapshots) > 1:
        raise WeightsUnknown(
            f"{folder}: is a cache with {len(snapshots)} snapshots of models",
            f"Name one of them, such as {snapshots[0]}.",
        )
    return _from_folder(snapshots[0])


def _from_reference(repository: str, revision: str, ask_hub: AskHub) -> ModelSource:
    """A repository's config.json, and the size of its files as the Hub lists them."""
    try:
        hub = ask_hub(repository, revision)
        pins = {pin.path: pin for pin in hub.files}
        config, quant = pins.get(CONFIG_FILE), pins.get(QUANT_FILE)
        if config is None:
            where = f"{hub.repository}: has no config.json at {hub.commit[:12]}"
            raise ModelUnreadable(where, _GGUF)
        data = hub.read(config), hub.read(quant) if quant else None
    except (OfflineMiss, SourceUnreachable) as error:
        # the shipped facts about it, else what to do without the Hub
        if (known := fact_of(repository)) is not None:
            model = known.architecture()
            origin = f"shipped facts about {repository}; the Hub was not reached"
            return ModelSource(repository, model, origin, _file_bytes(model), True)
        cached = user_cache() / cache_name(weights.weights_spec(repository))
        if snapshots_in(cached):
            instead = f"Without the Hub, name its folder in your cache: {cached}."
        else:
            shipped = shipped_repositories()
            near = ", ".join(nearest_models(repository, shipped))
            about = f", the nearest {near}" if near else ""
            instead = (
                "Without the Hub, name a folder with the model's config.json (`sm120 weights fit"
                f" FOLDER`); facts are shipped about {len(shipped)} models{about} (docs/fit.md"
                " lists them)."
            )
        raise type(error)(str(error), f"{error.hint} {instead}") from error
    try:
        model = parse_config(*data)
    except ModelUnreadable as error:
        hint = _GGUF if any(name.endswith(".gguf") for name in pins) else error.hint or _OWN_COPY
        raise ModelUnreadable(f"{hub.repository}: {error}", hint) from error
    shards = [pin.size_bytes for name, pin in pins.items() if _SHARD.fullmatch(name)]
    origin = f"config.json of {hub.repository} at {hub.commit[:12]}"
    size = sum(shards) or _file_bytes(model)
    return ModelSource(hub.repository, _beside_files(model, size), origin, size, not shards)


def _beside_files(model: Architecture, size: int) -> Architecture:
    """Adds to a model what the size of its files shows beyond its known parts."""
    known = _file_bytes(model)
    # layers for multi-token prediction are in the files, and engines do not load them
    spare = known * _TOLERATED + known // model.layers * 2 * model.predictors
    if known - known * _TOLERATED <= size <= known + spare:
        return model
    sizes = f"Its files have {gib(size)}, its known parts {gib(known)}"
    # a download that is not finished is no reason for doubt in the sum
    if size < known:
        return model.model_copy(update={"bounds": [*model.bounds, f"{sizes}, which are counted."]})
    sizes += "; the rest is counted, too, as if cards shared it."
    more = {"bounds": [*model.bounds, sizes], "unexplained_bytes": size - known}
    return model.model_copy(update=more)


def _file_bytes(model: Architecture) -> int:
    return sum(part.file_bytes() for part in tensor_parts(model))


def named_spec(checkout: Checkout, name: str) -> weights.WeightsSpec:
    """The spec of a name; the error for an unknown name suggests the nearest ones."""
    try:
        return weights.read_spec(checkout, name)
    except WeightsUnknown as error:
        near = nearest_models(name, [*weights.spec_names(checkout), *shipped_repositories()])
        raise WeightsUnknown(str(error), f"{did_you_mean(near)}{error.hint}") from error


def nearest_models(text: str, known: Iterable[str]) -> list[str]:
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
