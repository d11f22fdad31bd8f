"""The weights of a recipe on another host: where they lie there, and what that host proved."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from pipeline import foreign_json
from pipeline.errors import HostUnreached, WeightsDamaged, WeightsUnknown
from pipeline.host.fleet.remote import CommandResult, one_line
from pipeline.host.fleet.tunnel import Tunnel
from pipeline.known import Known, Unknown, unknown
from pipeline.model import Frozen
from pipeline.recipe.model import Recipe
from pipeline.serve import folder_probe
from pipeline.serve.weights import HostProof, WeightsFolder, tiny_model
from pipeline.weights.model import WeightsLock

# Where the role `weights` puts the program and the locks; else whatever the login finds.
PROGRAMS = (
    ("/opt/sm120/venv/bin/sm120", "--checkout", "/opt/sm120/checkout"),
    ("sm120",),
)
# Files with a receipt take seconds. Without one, hundreds of gigabytes would be read.
_VERIFY_S = 600.0
_MOST_BYTES = 16 << 20


class _Reported(Frozen):
    model_config = ConfigDict(frozen=True, extra="ignore")


class HostFolder(_Reported):
    """What `folder_probe` says of a folder."""

    folder: str | None
    has_file: bool = False
    first_parts: list[str] = []
    config: str | None = None


class _Set(_Reported):
    name: str
    lock: str
    files: int
    files_read: int
    whole: bool
    vouched_by: str = ""


class _Verified(_Reported):
    sets: list[_Set]


_FOLDER: TypeAdapter[HostFolder] = TypeAdapter(HostFolder)
_VERIFIED: TypeAdapter[_Verified] = TypeAdapter(_Verified)


def tiny_weights_on(tunnel: Tunnel, recipe: Recipe, *, dry_run: bool = False) -> WeightsFolder:
    """The tiny model, sent to the host; in a dry run only where it would be."""
    data, digest, file = tiny_model(recipe)
    name = f"tiny/{digest.removeprefix('sha256:')[:12]}"
    if dry_run:
        place = _probed(tunnel, ["where", name, file])
    else:
        place = _probed(tunnel, ["put", name, file], data)
    assert place.folder is not None
    return WeightsFolder(Path(place.folder), file, digest)


def look_at(tunnel: Tunnel, recipe: Recipe, folder: str) -> HostFolder:
    """A folder of the host, as far as the recipe needs it."""
    model = recipe.model
    return _probed(tunnel, ["look", folder, model.file or "", model.folder or ""])


def _probed(tunnel: Tunnel, words: list[str], data: bytes = b"") -> HostFolder:
    code = one_line(Path(folder_probe.__file__))
    done = tunnel.read(["python3", "-c", code, *words], stdin=data)
    try:
        if done.code:
            raise ValueError(done.message)
        return _FOLDER.validate_python(_json(done))
    except (ValueError, ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise WeightsUnknown(
            f"{tunnel.host}: its weights cannot be looked at: {reason}",
            "The host needs Python 3, as for `sm120 host provision`.",
        ) from error


def find_weights_on(
    tunnel: Tunnel, recipe: Recipe, folder: str, known: Collection[WeightsLock]
) -> WeightsFolder:
    """The weights in a folder of the host, with what the host itself says of their bytes."""
    place = look_at(tunnel, recipe, folder)
    if place.folder is None:
        raise WeightsUnknown(
            f"{tunnel.host}: {folder} is not a folder there",
            "--weights DIR names a folder of the host that serves.",
        )
    file = recipe.model.file or (place.first_parts[0] if len(place.first_parts) == 1 else "")
    proof, seal = _proof(tunnel, recipe, place.folder, known)
    if not place.has_file:
        proof = HostProof(good=False, why=f"{recipe.model.file} is not in {place.folder}")
    return WeightsFolder(
        Path(place.folder),
        file,
        seal,
        proof=proof,
        config=place.config,
    )


def _proof(
    tunnel: Tunnel, recipe: Recipe, folder: str, known: Collection[WeightsLock]
) -> tuple[HostProof, str | None]:
    done = _verify(tunnel, folder)
    if isinstance(done, Unknown):
        return HostProof(good=done), None
    if done.code == WeightsDamaged.exit_code:
        return HostProof(good=False, why=f"damaged there: {_error(done)}"), None
    if done.code:
        return HostProof(good=unknown(f"`sm120 weights verify` there: {_error(done)}")), None
    try:
        sets = _VERIFIED.validate_python(_json(done)).sets
    except (ValueError, ValidationError):
        return HostProof(good=unknown("the answer of the host's sm120 cannot be read")), None
    own = [each for each in sets if each.name == recipe.model.weights]
    if not own:
        names = ", ".join(each.name for each in sets) or "no locked set"
        why = f"the folder holds {names}, the recipe is for {recipe.model.weights}"
        return HostProof(good=unknown(why)), None
    return _judged(own[0], known), own[0].lock


def _judged(found: _Set, known: Collection[WeightsLock]) -> HostProof:
    """Whole by the same lock as here; a host's own lock alone proves little."""
    here = next((lock for lock in known if lock.name == found.name), None)
    if here is not None and here.seal != found.lock:
        return HostProof(good=False, why=f"the host has another lock of {found.name}")
    if here is None and not found.vouched_by:
        return HostProof(good=unknown(f"nothing vouches for the lock of {found.name} there"))
    if not found.whole:
        return HostProof(good=False, why=f"{found.name} is not whole there")
    why = f"{found.files} files are as locked, {found.files_read} read just now"
    return HostProof(good=True, why=why)


def _verify(tunnel: Tunnel, folder: str) -> Known[CommandResult]:
    for words in PROGRAMS:
        if tunnel.read([words[0], "--version"]).code == 0:
            break
    else:
        return unknown("the host has no sm120 that could prove them (role weights installs it)")
    try:
        order = [*words, "weights", "verify", folder, "--json"]
        return tunnel.read(order, limit_s=_VERIFY_S)
    except HostUnreached as error:
        return unknown(f"{error}; run `sm120 weights verify {folder}` there first")


def _error(done: CommandResult) -> str:
    """What the host's sm120 says is wrong; with --json it says so in JSON."""
    try:
        error = foreign_json.read_json(done.message.encode(), most_bytes=_MOST_BYTES)
    except foreign_json.JsonInvalid:
        return done.message
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else done.message


def _json(done: CommandResult) -> object:
    return foreign_json.read_json(done.out, most_bytes=_MOST_BYTES, any_int=True)
