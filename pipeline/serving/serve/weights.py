"""The weights of a recipe, on this machine or on another host, and what is known of their bytes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts.store.store import Store
from pipeline.core import foreign_json, log
from pipeline.core.errors import HostUnreached, RecipeInvalid, WeightsDamaged, WeightsUnknown
from pipeline.core.known import Known, unknown
from pipeline.core.model import ForeignModel, sha256_of
from pipeline.hosts.fleet.remote import CommandResult, one_line
from pipeline.hosts.fleet.tunnel import Tunnel
from pipeline.serving.recipe import tiny
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.serve import folder_probe
from pipeline.weights.disk.receipt import is_own
from pipeline.weights.model import WeightsLock
from pipeline.weights.place import LockedFolder, find_places

# Where the role `weights` puts the program and the locks; else whatever the login finds.
PROGRAMS = (("/opt/sm120/venv/bin/sm120", "--checkout", "/opt/sm120/checkout"), ("sm120",))
# Files with a receipt take seconds. Without one, hundreds of gigabytes would be read.
_VERIFY_S = 600.0
_MOST_BYTES = 16 << 20  # of an answer of the host; it may hold a config.json


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
    place: LockedFolder | None = None
    # of weights on another host
    proof: HostProof | None = None
    config: str | None = None  # its config.json, where it has one


def tiny_weights(place: Store | Tunnel, recipe: Recipe, *, dry_run: bool = False) -> WeightsFolder:
    """Puts the tiny model into the store or sends it to a host; a dry run only says where to."""
    if recipe.engine not in ("llama-cpp", "ik-llama"):
        raise RecipeInvalid(
            f"{recipe.name}: the tiny model is a GGUF file, which {recipe.engine} does not serve",
            "Name a recipe of llama.cpp, such as tiny-cpu, or weights of the recipe's own.",
        )
    data, file = tiny.tiny_gguf(), recipe.model.file or tiny.FILE
    digest = sha256_of(data)
    # by its digest: a container of an older version may still have its file open
    name = f"tiny/{digest.removeprefix('sha256:')[:12]}"
    if not isinstance(place, Store):
        words = ["where" if dry_run else "put", name, file]
        found = _probed(place, words, b"" if dry_run else data)
        assert found.folder is not None
        return WeightsFolder(Path(found.folder), file, digest)
    folder = place.root / name
    if not dry_run:
        place.write(folder / file, data)
        # the container's own user reads it
        folder.chmod(0o755)
    return WeightsFolder(folder, file, digest)


def find_weights(recipe: Recipe, folder: Path, known: Collection[WeightsLock]) -> WeightsFolder:
    """Finds the weights in a folder: a plain one, a fetched set, or a Hub cache."""
    if not folder.is_dir():
        raise WeightsUnknown(f"{folder}: is not a folder", "Name the weights with --weights DIR.")
    file, model = recipe.model.file or "", recipe.model
    try:
        places = find_places(folder, known)
    except WeightsUnknown:
        # weights without a lock can be served, but not proved; preflight says so
        return WeightsFolder(folder.resolve(), file)
    # several sets may share a folder
    own = [p for p in places if p.lock.name == model.weights]
    own = own or [p for p in places if p.lock.repository == model.repository]
    if not own and len(places) == 1 and is_own(places[0].lock):
        # the user locked these files, and names them for this recipe
        log.say(f"{folder}: {places[0].lock.name} is a lock of your own files")
        own = places
    if not own:
        names = ", ".join(p.lock.name for p in places)
        raise WeightsUnknown(
            f"{folder}: holds {names}, but {recipe.name} is for {model.repository}",
            "Name the folder of the recipe's own weights with --weights DIR.",
        )
    place = own[0]
    found = place.root.resolve()
    if place.hub_cache:
        # engines want the folder with the config.json; the mount is widened later
        found /= place.snapshot.relative_to(place.root)
    return WeightsFolder(found, file, place.lock.seal, place)


class HostFolder(ForeignModel):
    """What `folder_probe` says of a folder."""

    folder: str | None
    has_file: bool = False
    first_parts: list[str] = []
    config: str | None = None


class _Set(ForeignModel):
    name: str
    lock: str
    files: int
    files_read: int
    whole: bool
    vouched_by: str = ""


class _Verified(ForeignModel):
    sets: list[_Set]


def _probed(tunnel: Tunnel, words: list[str], data: bytes = b"") -> HostFolder:
    code = one_line(Path(folder_probe.__file__))
    done = tunnel.read(["python3", "-c", code, *words], stdin=data)
    try:
        if done.code:
            raise ValueError(done.message)
        return HostFolder.model_validate(_json(done))
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise WeightsUnknown(
            f"{tunnel.host}: its weights cannot be looked at: {reason}",
            "The host needs Python 3, as for `sm120 host provision`.",
        ) from error


def find_weights_on(
    tunnel: Tunnel, recipe: Recipe, folder: str, known: Collection[WeightsLock]
) -> WeightsFolder:
    """Finds the weights in a folder of the host, with what the host itself says of their bytes."""
    model = recipe.model
    place = _probed(tunnel, ["look", folder, model.file or "", model.folder or ""])
    if place.folder is None:
        raise WeightsUnknown(
            f"{tunnel.host}: {folder} is not a folder there",
            "--weights DIR names a folder of the host that serves.",
        )
    file = model.file or (place.first_parts[0] if len(place.first_parts) == 1 else "")
    seal: str | None = None
    found = _verified(tunnel, place.folder)
    if isinstance(found, HostProof):
        proof = found
    elif own := next((each for each in found if each.name == model.weights), None):
        seal = own.lock
        ours = next((lock for lock in known if lock.name == own.name), None)
        # whole by the same lock as here; a host's own lock alone proves little
        if ours is not None and ours.seal != seal:
            proof = HostProof(good=False, why=f"the host has another lock of {own.name}")
        elif ours is None and not own.vouched_by:
            proof = HostProof(good=unknown(f"nothing vouches for the lock of {own.name} there"))
        elif not own.whole:
            proof = HostProof(good=False, why=f"{own.name} is not whole there")
        else:
            why = f"{own.files} files are as locked, {own.files_read} read just now"
            proof = HostProof(good=True, why=why)
    else:
        names = ", ".join(each.name for each in found) or "no locked set"
        why = f"the folder holds {names}, the recipe is for {model.weights}"
        proof = HostProof(good=unknown(why))
    # a whole set without the recipe's own file is of no use to it
    if not place.has_file:
        proof = HostProof(good=False, why=f"{model.file} is not in {place.folder}")
    return WeightsFolder(Path(place.folder), file, seal, proof=proof, config=place.config)


def _verified(tunnel: Tunnel, folder: str) -> list[_Set] | HostProof:
    """The sets that the host's own sm120 finds in a folder, or what is known without them."""
    for words in PROGRAMS:
        if tunnel.read([words[0], "--version"]).code == 0:
            break
    else:
        why = "the host has no sm120 that could prove them (role weights installs it)"
        return HostProof(good=unknown(why))
    try:
        order = [*words, "weights", "verify", folder, "--json"]
        done = tunnel.read(order, limit_s=_VERIFY_S)
    except HostUnreached as error:
        why = f"{error}; run `sm120 weights verify {folder}` there first"
        return HostProof(good=unknown(why))
    if done.code == WeightsDamaged.exit_code:
        return HostProof(good=False, why=f"damaged there: {_error(done)}")
    if done.code:
        return HostProof(good=unknown(f"`sm120 weights verify` there: {_error(done)}"))
    try:
        return _Verified.model_validate(_json(done)).sets
    except ValueError:
        return HostProof(good=unknown("the answer of the host's sm120 cannot be read"))


def _error(done: CommandResult) -> str:
    """What the host's sm120 says is wrong; with --json it says so in JSON."""
    try:
        error = foreign_json.read_json(done.message.encode(), most_bytes=_MOST_BYTES)
    except foreign_json.JsonInvalid:
        return done.message
    message = foreign_json.value_at(error, "message")
    return message if isinstance(message, str) else done.message


def _json(done: CommandResult) -> object:
    return foreign_json.read_json(done.out, most_bytes=_MOST_BYTES, any_int=True)
