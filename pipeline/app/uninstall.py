"""Remove what `sm120` made on a machine: the store, tags, environments and, if asked, keys."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, cast

from pipeline.app.signing import own_trust_file
from pipeline.app.workspace import Workspace
from pipeline.artifacts.attest.keyring import DEFAULT, default_folder, made_pairs
from pipeline.artifacts.containers.arguments import Label
from pipeline.artifacts.containers.docker import Docker, LoadedTag
from pipeline.artifacts.containers.facts import own_name
from pipeline.artifacts.containers.podman import Podman
from pipeline.artifacts.store.store import Store
from pipeline.artifacts.store.upkeep import disk_bytes, own_parts, remove_store, stats_below
from pipeline.core import log
from pipeline.core.errors import AlreadyServed, DockerUnavailable, KeyInvalid
from pipeline.core.files import os_errors_explained, remove_tree
from pipeline.core.model import Frozen
from pipeline.images.spec.checkout import Checkout

What = Literal["store", "Docker tag", "Podman tag", "environment", "key", "trust file"]
# Only these are kept unless they are asked for: a key that is lost cannot be made again.
_OF_RECIPES = {"label": Label.RECIPE}
PRECIOUS = ("key", "trust file")
# The store holds what is mounted into it, and this command is needed to end it.
_STOP_FIRST = "`sm120 recipe stop --all` ends it; then try again."


class Item(Frozen):
    """One thing that can go."""

    what: What
    where: str
    size_bytes: int
    goes: bool = True
    kept_for: str = ""  # why it stays


class Loaded(NamedTuple):
    """Images in a container engine: the tags that are ours, and how to take one away."""

    what: What
    tags: list[LoadedTag]
    served: list[str]  # recipes whose engines run in it
    of_others: list[str]  # the same of other users
    untag: Callable[[str], str]


@dataclass(frozen=True)
class Inventory:
    """Everything that `sm120` made on this machine, what stays of it, and what is served."""

    items: list[Item]
    stays: list[str]
    served: list[str]
    loaded: list[Loaded]
    store: Store

    @property
    def going(self) -> list[Item]:
        return [item for item in self.items if item.goes]


def take_inventory(workspace: Workspace, *, keys: bool = False) -> Inventory:
    """List what can be removed; keys and the trust file go only with `keys`."""
    store, checkout, loaded = Store(workspace.store_root()), workspace.checkout_or_none(), _loaded()
    items, noted = [], store.loaded_tags()
    for each in loaded:
        for tag in each.tags:
            # Docker may be shared: only what this store loaded goes; Podman is the user's own
            is_own = each.what == "Podman tag" or tag.tag in noted
            why = "" if is_own else "kept (loaded by another user, or by an older version)"
            size = tag.size_bytes
            items.append(
                Item(what=each.what, where=tag.tag, size_bytes=size, goes=is_own, kept_for=why)
            )
    if own_parts(store.root):
        size = disk_bytes(store.root)
        items.append(Item(what="store", where=str(store.root), size_bytes=size))
    items += _key_items(goes=keys)
    # last: this very program may run from one of them
    items += _environment_items(checkout)
    stays = _what_stays(items, checkout) if items else []
    served = sorted(name for each in loaded for name in each.served)
    stays += [f"{name} is served: {_STOP_FIRST}" for name in served]
    stays += [f"{text}, and stays" for each in loaded for text in each.of_others]
    return Inventory(items, stays, served, loaded, store)


def remove(inventory: Inventory) -> None:
    """Remove what goes; refuses while recipes are served."""
    if inventory.served:
        names = ", ".join(inventory.served)
        raise AlreadyServed(f"nothing was removed: {names} is served", _STOP_FIRST)
    with log.watched(f"Removing {log.count(len(inventory.going), 'thing')}"):
        _remove(inventory)


def _loaded() -> list[Loaded]:
    """What each container engine that answers holds of ours."""
    loaded = []
    for look in (_in_docker, _in_podman) if Podman.is_there() else (_in_docker,):
        try:
            loaded.append(look())
        except DockerUnavailable as error:
            log.say(f"{error}: tags of images in it are not listed")
    return loaded


def _in_docker() -> Loaded:
    docker = Docker()
    served: list[str] = []
    of_others: list[str] = []
    for row in docker.client.api.containers(filters=_OF_RECIPES):
        name, owner = row["Labels"][Label.RECIPE], row["Labels"].get(Label.OWNER, own_name())
        if owner == own_name():
            served.append(name)
        else:
            of_others.append(f"{name} is served by another user ({owner[:200]})")
    return Loaded("Docker tag", docker.own_tags(), served, of_others, docker.untag)


def _in_podman() -> Loaded:
    # this user's images: every other one has their own
    podman = Podman()
    tags = podman.own_tags()
    # `created`: it may run all the same, where Podman forgot it
    may_run = [f for f in podman.containers() if f.running or f.status == "created"]
    served = [facts.labels[Label.RECIPE] for facts in may_run]
    return Loaded("Podman tag", tags, served, [], podman.untag)


def _key_items(*, goes: bool) -> list[Item]:
    with suppress(KeyInvalid):  # a user id without an account has no keys
        folder = default_folder(os.environ)
        # what a link leads to may be another's: another user's keys, or files that others share
        if folder.is_symlink() or folder.parent.is_symlink():
            return []
        pairs = [half for pair in made_pairs(folder) for half in pair]
        trust = own_trust_file()
        paths = {"key": [*pairs, *folder.glob(DEFAULT)], "trust file": [trust] if trust else []}
        return [
            Item(what=cast(What, what), where=str(path), size_bytes=path.lstat().st_size, goes=goes)
            for what, found in paths.items()
            for path in found
            if path.is_file() and not path.is_symlink()
        ]
    return []


def _environment_items(checkout: Checkout | None) -> list[Item]:
    """Environments that noxfile.py made: each has the digest of its lock in it."""
    if checkout is None or (checkout.root / ".nox").is_symlink():
        return []
    locks = sorted((checkout.root / "lockfiles" / "tool").glob("*.txt"))
    homes = [checkout.root / ".nox" / lock.stem for lock in locks]
    return [
        Item(
            what="environment",
            where=str(home),
            size_bytes=sum(s.st_size for s in stats_below(home)),
        )
        for home in homes
        if (home / "locked").is_file() and not home.is_symlink()
    ]


def _what_stays(items: list[Item], checkout: Checkout | None) -> list[str]:
    """What stays afterwards, when this command is gone, and how to remove it."""
    lines = []
    with suppress(KeyInvalid):
        folder = default_folder(os.environ)
        if link := next((p for p in (folder, folder.parent) if p.is_symlink()), None):
            lines.append(f"{link} is a link: the keys that it leads to stay.")
    if any(item.what in PRECIOUS and not item.goes for item in items):
        home = shlex.quote(str(default_folder(os.environ).parent))
        lines.append(f"Keys and trust file stay: --keys removes them now, `rm -r {home}` later.")
    here = Path(sys.prefix).resolve()
    if own := [i.where for i in items if Path(i.where).resolve() == here]:
        lines.append(f"This command itself goes with {own[0]}.")
    if checkout:
        lines.append(f"The checkout stays: `rm -r {shlex.quote(str(checkout.root))}` removes it.")
    return lines


def _remove(inventory: Inventory) -> None:
    untag = {each.what: each.untag for each in inventory.loaded}
    refused = []
    for item in inventory.going:
        path = Path(item.where)
        if item.what in untag and (why := untag[item.what](item.where)):
            refused.append(f"{item.where}: {why}")
        # the store knows which tags are ours, and is needed again where one was refused
        elif item.what == "store" and not refused:
            for foreign in remove_store(inventory.store):
                log.say(f"{foreign}: is not the store's own, and stays")
        elif item.what in PRECIOUS:
            with os_errors_explained(path):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # the rest of the folder is not ours
                path.parent.rmdir()
        # this command may be in one of them, and is needed again
        elif item.what == "environment" and not refused:
            remove_tree(path)
    if refused:
        raise DockerUnavailable(
            f"in use, and kept: {'; '.join(refused)}",
            "The store and the environments are kept, too. `sm120 recipe stop RECIPE` ends a"
            " container; then try again.",
        )
