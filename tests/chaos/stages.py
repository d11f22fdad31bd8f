"""The stages: what is prepared once, the command, and how its result is known by its bytes.

Results are read here, not by the product: a judge that asks the accused learns nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.judge import Half
from tests.chaos.world import HUB, INDEX, REGISTRY, REPOSITORY, World, weights_files
from tests.unit.support import make_checkout

NET = ("down", "lies", "partition", "dns")
PROCESS = ("kill", "kill-write", "clock")
DISK = ("full", "read-only", "power", "disk-error")
ALL = (*PROCESS, *DISK, "twice")
PULL_TAG, TAG = "v0", "v1"


@dataclass(frozen=True)
class Stage:
    """One command, with everything that a trial of it needs to know."""

    name: str
    prepare: Callable[[World], None]  # into world.place
    command: Callable[[World], list[str]]
    result: Callable[[World], str | None]
    faults: tuple[str, ...]
    wires: tuple[str, ...] = ()  # the servers that it asks
    rot: tuple[str, ...] = ()  # globs of what may rot before it reads it
    heal: tuple[tuple[str, ...], ...] = ()  # what a user runs who has read the hint, after rot
    is_done_once: bool = False
    makes: tuple[
        str, ...
    ] = ()  # globs of what it may write anew, though without a fault it does not
    reset: Callable[[World], None] = lambda world: None  # what lies outside of the place
    env: Callable[[World], dict[str, str]] = lambda world: {}


def digest_of(*parts: bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())
    return total.hexdigest()


def file_digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def blob(folder: Path, digest: str, size: int | None = None) -> bytes:
    """A blob of a layout whose name is its hash."""
    path = folder / "blobs" / digest.replace(":", "/")
    if not path.is_file():
        raise Half(f"{path.name[:12]} is named and not there")
    data = path.read_bytes()
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest or size not in (None, len(data)):
        raise Half(f"{path.name[:12]} has other bytes than its name")
    return data


def layout(folder: Path) -> str | None:
    """The manifests of an OCI layout with all that they name; none where it has no index."""
    if not (folder / "index.json").is_file():
        return None
    found = []
    for entry in _json(folder / "index.json")["manifests"]:
        manifest = json.loads(blob(folder, entry["digest"], entry["size"]))
        for part in [manifest["config"], *manifest["layers"]]:
            blob(folder, part["digest"], part["size"])
        # what is signed has a time in it
        if "subject" not in manifest:
            found.append(entry["digest"])
    return " ".join(sorted(found))


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError:
        raise Half(f"{path.name} is no JSON") from None


def store_image(world: World) -> str | None:
    """The image that the store says it has."""
    store = world.place / "store"
    for path in sorted((store / "oci" / "blobs" / "sha256").glob("*")):
        if hashlib.sha256(path.read_bytes()).hexdigest() != path.name:
            raise Half(f"the store's {path.name[:12]} has other bytes than its name")
    records = sorted((store / "images").glob("*/*/image.json"))
    for record in records:
        digest = _json(record)["descriptor"]["digest"]
        manifest = json.loads(blob(store / "oci", digest))
        for part in [manifest["config"], *manifest["layers"]]:
            blob(store / "oci", part["digest"], part["size"])
        # the index follows the record at once, or with the next run
    return " ".join(_json(r)["descriptor"]["digest"] for r in records) or None


def checkout(world: World, **image: Any) -> None:
    """A user's checkout: one image, one weights set, a key."""
    wheels = sorted((world.parts / "wheels").glob("*.whl"))
    names = [wheel.name.partition("-")[0] for wheel in wheels]
    python = {"requirements": names}
    here = make_checkout(world.place / "checkout", wheels, python=python, **image)
    spec = {
        "name": "tiny",
        "repository": REPOSITORY,
        "format": "safetensors",
        "quant": "bf16",
        "about": "A small set of weights that is fetched under bad conditions.",
    }
    path = here.root / "lockfiles" / "weights" / "tiny.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(spec), encoding="utf-8")
    (world.place / "home").mkdir()
    world.sm120("evidence", "new-key", "builder")


def built(world: World) -> None:
    checkout(world)
    world.sm120("build", "tiny", "--accept", "--mirror", str(world.parts / "wheels"), "--offline")


def golden_checkout(world: World) -> None:
    """The digest is known, the store is empty: a build must come to the same."""
    built(world)
    shutil.rmtree(world.place / "store")


def weights_locked(world: World) -> None:
    checkout(world)
    world.sm120("weights", "lock", "tiny")


def weights_fetched(world: World) -> None:
    weights_locked(world)
    world.sm120("weights", "fetch", "tiny", "--output", str(world.place / "models"))


def weights_damaged(world: World) -> None:
    """One bit is wrong, and somebody has noticed."""
    weights_fetched(world)
    flip(world.place / "models" / "model-00001-of-00002.safetensors", 3_333_333)


def flip(path: Path, at: int) -> None:
    """One bit of a file, in place."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def weights_set(world: World) -> str | None:
    """The set: each file that has its name has its bytes, whoever says what about it."""
    folder, wanted = world.place / "models", weights_files()
    there = [name for name in wanted if (folder / name).is_file()]
    for name in there:
        if (folder / name).read_bytes() != wanted[name]:
            raise Half(f"{name} has other bytes than were locked")
    if len(there) < len(wanted):
        return None
    return digest_of(*wanted.values())


def weights_or_damaged(world: World) -> str | None:
    """The same for a repair, before which one file is known to be damaged."""
    folder = world.place / "models"
    data, right = (
        (folder / "model-00001-of-00002.safetensors").read_bytes(),
        weights_files()["model-00001-of-00002.safetensors"],
    )
    if data != right and sum(a != b for a, b in zip(data, right, strict=True)) == 1:
        return "damaged as before"
    return weights_set(world)


def published(world: World) -> str | None:
    """The image behind the tag, whole in the registry, with what is attached to it."""
    registry, name = world.registry, "app"
    digest = registry.tags.get((name, TAG))
    if digest is None:
        return None
    for (_, own), (_, data) in registry.manifests.items():
        manifest = json.loads(data)
        for part in [manifest["config"], *manifest["layers"]] if "layers" in manifest else []:
            held = registry.blobs.get((name, part["digest"]))
            if held is None or len(held) != part["size"]:
                raise Half(f"the manifest {own[:19]} names a blob that the registry has not")
    return digest


def empty_registry(world: World) -> None:
    registry = world.registry
    for each in (registry.blobs, registry.manifests, registry.uploads, registry.tags):
        each.clear()


def to_pull(world: World) -> None:
    """An image in a registry, signed under its name there."""
    built(world)
    empty_registry(world)
    world.sm120("publish", "tiny", at_registry(world, PULL_TAG), "--insecure-http")
    registry = world.registry
    world.shelf = (dict(registry.blobs), dict(registry.manifests), dict(registry.tags))


def refill_registry(world: World) -> None:
    """What lay there when it was published."""
    empty_registry(world)
    blobs, manifests, tags = world.shelf
    world.registry.blobs.update(blobs)
    world.registry.manifests.update(manifests)
    world.registry.tags.update(tags)


PLAN = """format: 1
stages:
  image: {run: build tiny --mirror ../../parts/wheels --offline}
  layout: {run: image export tiny layout, needs: [image]}
  set: {run: weights fetch tiny --output ../models}
"""


def planned(world: World) -> None:
    golden_checkout(world)
    world.sm120("weights", "lock", "tiny")
    (world.place / "checkout" / "plan.yaml").write_text(PLAN)


def plan_result(world: World) -> str | None:
    parts = [store_image(world), layout(world.place / "checkout" / "layout"), weights_set(world)]
    return " ".join(str(part) for part in parts) if all(parts) else None


def out(world: World, name: str = "out") -> str:
    return str(world.place / name)


def at_registry(world: World, tag: str) -> str:
    return f"{REGISTRY}:{world.wires[REGISTRY].port}/app:{tag}"


def collected(world: World) -> str | None:
    """The wheels that are to be carried: each is whole, or not there under its name."""
    wanted = {p.name: p.read_bytes() for p in (world.parts / "wheels").iterdir()}
    folder = world.place / "out"
    there = [name for name in wanted if (folder / name).is_file()]
    for name in there:
        if (folder / name).read_bytes() != wanted[name]:
            raise Half(f"{name} has other bytes than were locked")
    return digest_of(*wanted.values()) if len(there) == len(wanted) else None


REPAIR_STORE = (("store", "check", "--repair"), ("build", "tiny"))
BLOBS = "store/oci/blobs/sha256/*"
STAGES: list[Stage] = [
    Stage(
        "build",
        golden_checkout,
        lambda w: ["build", "tiny"],
        store_image,
        (*ALL, *NET),
        (INDEX,),
    ),
    Stage(
        "build again",
        built,
        lambda w: ["build", "tiny"],
        store_image,
        ("kill", "rot", "read-only", "clock", "twice"),
        rot=(BLOBS, "store/layers/*", "store/contents/*", "store/images/*/*/image.json"),
        heal=REPAIR_STORE,
    ),
    Stage(
        "image export",
        built,
        lambda w: ["image", "export", "tiny", out(w)],
        lambda w: layout(w.place / "out"),
        (*ALL, "rot"),
        rot=(BLOBS,),
        heal=REPAIR_STORE,
    ),
    Stage(
        "image collect",
        checkout,
        lambda w: ["image", "collect", "tiny", "--output", out(w)],
        collected,
        ("kill", "kill-write", "full", "power", "twice", *NET),
        (INDEX,),
    ),
    Stage(
        "publish",
        built,
        lambda w: ["publish", "tiny", at_registry(w, TAG), "--insecure-http"],
        published,
        ("kill", "kill-write", "rot", "clock", "power", "full", "twice", *NET),
        (REGISTRY,),
        rot=(BLOBS,),
        heal=REPAIR_STORE,
        reset=empty_registry,
    ),
    Stage(
        "registry pull",
        to_pull,
        lambda w: ["registry", "pull", at_registry(w, PULL_TAG), out(w), "--insecure-http"],
        lambda w: layout(w.place / "out"),
        (*ALL, *NET),
        (REGISTRY,),
        reset=refill_registry,
    ),
    Stage(
        "weights lock",
        checkout,
        lambda w: ["weights", "lock", "tiny"],
        lambda w: file_digest(w.place / "checkout/lockfiles/weights/tiny.lock.yaml"),
        ("kill", "kill-write", "full", "read-only", "clock", "twice", *NET),
        (HUB,),
    ),
    Stage(
        "weights fetch",
        weights_locked,
        lambda w: ["weights", "fetch", "tiny", "--output", out(w, "models")],
        weights_set,
        (*ALL, *NET),
        (HUB, "cdn.chaos.test"),
    ),
    Stage(
        "weights verify",
        weights_fetched,
        lambda w: ["weights", "verify", out(w, "models"), "--full"],
        weights_set,
        (*ALL, "rot"),
        rot=("models/*.safetensors", "models/config.json"),
        heal=(("weights", "verify", "MODELS", "--full", "--repair"),),
    ),
    Stage(
        "weights repair",
        weights_damaged,
        lambda w: ["weights", "verify", out(w, "models"), "--full", "--repair"],
        weights_or_damaged,
        (*ALL, *NET),
        (HUB, "cdn.chaos.test"),
    ),
    Stage(
        "run PLAN",
        planned,
        lambda w: ["run", "plan.yaml"],
        plan_result,
        ("kill", "kill-write", "full", "read-only", "power", "twice", "down"),
        (HUB, "cdn.chaos.test"),
    ),
]
