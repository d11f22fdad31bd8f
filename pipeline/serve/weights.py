"""The weights of a recipe on this machine: where they lie, and how an engine gets to see them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pipeline import log
from pipeline.errors import RecipeInvalid, WeightsUnknown
from pipeline.known import Known
from pipeline.model import sha256_of
from pipeline.recipe import tiny
from pipeline.recipe.model import Recipe
from pipeline.store.store import Store
from pipeline.weights.disk.lock_folder import is_own
from pipeline.weights.model import WeightsLock
from pipeline.weights.place import Place, find_places

_GGUF = ("llama-cpp", "ik-llama")


@dataclass(frozen=True)
class HostProof:
    """What another host says of the bytes that it has."""

    good: Known[bool]
    why: str = ""


@dataclass(frozen=True)
class WeightsFolder:
    """A folder that is mounted, the model in it, and what is known about its bytes."""

    folder: Path
    file: str = ""
    digest: str | None = None
    place: Place | None = None
    # of weights on another host
    proof: HostProof | None = None
    config: str | None = None  # its config.json, where it has one


def tiny_model(recipe: Recipe) -> tuple[bytes, str, str]:
    """The tiny model: its bytes, their digest and the name of its file."""
    if recipe.engine not in _GGUF:
        raise RecipeInvalid(
            f"{recipe.name}: the tiny model is a GGUF file, which {recipe.engine} does not serve",
            "Name a recipe of llama.cpp, such as tiny-cpu, or weights of the recipe's own.",
        )
    data = tiny.tiny_gguf()
    return data, sha256_of(data), recipe.model.file or tiny.FILE


def tiny_weights(store: Store, recipe: Recipe, *, dry_run: bool = False) -> WeightsFolder:
    """The tiny model, made on the spot; in a dry run only where it would be."""
    data, digest, file = tiny_model(recipe)
    # by its digest: a container of an older version may still have its file open
    folder = store.root / "tiny" / digest.removeprefix("sha256:")[:12]
    if not dry_run:
        store.write(folder / file, data)
        # read by the container's own user
        folder.chmod(0o755)
    return WeightsFolder(folder, file, digest)


def find_weights(recipe: Recipe, folder: Path, known: Collection[WeightsLock]) -> WeightsFolder:
    """The weights in a folder: a plain one, a set that was fetched, or a Hub cache."""
    if not folder.is_dir():
        raise WeightsUnknown(f"{folder}: is not a folder", "Name the weights with --weights DIR.")
    file = recipe.model.file or ""
    place = _place(recipe, folder, known)
    seal = place.lock.seal if place else None
    if place is not None and place.hub_cache:
        snapshot = place.root.resolve() / place.snapshot.relative_to(place.root)
        return WeightsFolder(snapshot, file, seal, place)
    return WeightsFolder((place.root if place else folder).resolve(), file, seal, place)


def _place(recipe: Recipe, folder: Path, known: Collection[WeightsLock]) -> Place | None:
    try:
        places = find_places(folder, known)
    except WeightsUnknown:
        # weights that nobody locked can be served, but not proved; preflight says so
        return None
    model = recipe.model
    own = [p for p in places if p.lock.name == model.weights]
    own = own or [p for p in places if p.lock.repository == model.repository]
    if not own and len(places) == 1 and is_own(places[0].lock):
        # the user locked these files, and names them for this recipe
        log.say(f"{folder}: {places[0].lock.name} is a lock of your own files")
        return places[0]
    if not own:
        names = ", ".join(p.lock.name for p in places)
        raise WeightsUnknown(
            f"{folder}: holds {names}, but {recipe.name} is for {model.repository}",
            "Name the folder of the recipe's own weights with --weights DIR.",
        )
    return own[0]
