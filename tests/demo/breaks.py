"""One thing of each kind is broken, and the command that should notice is asked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from pipeline.core.errors import (
    NumberChanged,
    PatchConflict,
    PreflightFailed,
    PromiseBroken,
    TagMoved,
    WeightsDamaged,
)
from tests.demo.checkout import IMAGE, PATCH, RECIPE, WEIGHTS
from tests.demo.overview import LeftOut, Noticed
from tests.demo.shell import Ended
from tests.demo.world import BUILD, NODES_STEP, PUBLISH, REPORT, WEIGHTS_STAGE, World, needed
from tests.integration.published import PASSWORD, USER

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
# the headline, as the data that a page embeds has it
_NUMBER = re.compile(rb'"output_tok_s": ?\{[^{}]*"mean": ?(\d)')
_SHOWN = re.compile(r"^(report|image|weights|host facts|recipe|\d+ (?:wheel|patch))\b")


def break_all(world: World, look_in: Sequence[str]) -> list[str]:
    """Each break in turn, taken back after it; the reasons of those that were left out."""
    missed = []
    for name, act in BREAKS.items():
        try:
            ended = act(world, look_in)
        except LeftOut as why:
            missed.append(f"{name} ({why})")
            continue
        line = world.shell.shown(ended.line)
        found = Noticed(name, ended.shown, ended.code, line)
        world.overview.noticed.append(found)
        world.overview.typed(f"{name}: exit code {ended.code}: {line}")
    return missed


def weight_byte(world: World, look_in: Sequence[str]) -> Ended:
    """On the node, where the next start is refused; without one, on this disk."""
    place = needed(world.weights, WEIGHTS_STAGE)
    if world.site is None:
        with flipped_byte(place / "tiny.gguf"):
            code = WeightsDamaged.exit_code
            return world.shell.sm120("weights", "verify", str(place), expect=code)
    file = f"/models/{WEIGHTS}/tiny.gguf"
    world.shell.sm120("recipe", "stop", RECIPE, *world.on_node)
    world.site.first.shell(f"printf X | dd of={file} bs=1 seek=500000 conv=notrunc status=none")
    words = ("serve", RECIPE, "--weights", f"/models/{WEIGHTS}", *world.on_node)
    return world.shell.sm120(*words, expect=PreflightFailed.exit_code)


@contextmanager
def flipped_byte(path: Path, at: int = 500_000) -> Iterator[None]:
    """One bit of one byte, and back."""
    kept = path.read_bytes()
    path.write_bytes(kept[:at] + bytes([kept[at] ^ 1]) + kept[at + 1 :])
    try:
        yield
    finally:
        path.write_bytes(kept)


def moved_tag(world: World, look_in: Sequence[str]) -> Ended:
    """Somebody with the registry's password writes another image under the signed tag."""
    registry = needed(world.registry, PUBLISH)
    assert world.image
    url = f"{registry.url}/v2/team/{IMAGE}/manifests"
    with requests.Session() as session:
        session.trust_env, session.verify = False, str(registry.ca_file)
        session.auth, session.headers["Accept"] = (USER, PASSWORD), MANIFEST
        real = session.get(f"{url}/{world.image}", timeout=30).content
        other = {**json.loads(real), "annotations": {"note": "another image"}}
        put_manifest(session, f"{url}/v1", json.dumps(other).encode())
        try:
            words = ("verify", f"{world.place_of(IMAGE)}:v1", "--ca", str(registry.ca_file))
            return world.shell.sm120(*words, expect=TagMoved.exit_code)
        finally:
            put_manifest(session, f"{url}/v1", real)


def put_manifest(session: requests.Session, url: str, data: bytes) -> None:
    """What a tag names from now on."""
    headers = {"Content-Type": MANIFEST}
    session.put(url, data=data, headers=headers, timeout=30).raise_for_status()


def edited_patch(world: World, look_in: Sequence[str]) -> Ended:
    """The series says what a patch makes of each file."""
    needed(world.image, BUILD)
    path = world.checkout / "images" / IMAGE / "patches" / PATCH
    with edited(path, b"patched by", b"patched for"):
        words = ("build", IMAGE, "--platform", "host", "--offline")
        return world.shell.sm120(*words, expect=PatchConflict.exit_code)


@contextmanager
def edited(path: Path, old: bytes, new: bytes) -> Iterator[None]:
    """A file with one replacement, and as it was."""
    kept = path.read_bytes()
    assert kept.count(old) == 1
    path.write_bytes(kept.replace(old, new))
    try:
        yield
    finally:
        path.write_bytes(kept)


def host_setting(world: World, look_in: Sequence[str]) -> Ended:
    """A kernel knob that somebody turned by hand."""
    site = needed(world.site, NODES_STEP)
    site.second.shell("echo 60 > /proc/sys/vm/swappiness")
    words = ("host", "verify", "-i", str(world.inventory), "--limit", "n2", "--brief")
    return world.shell.sm120(*words, expect=PromiseBroken.exit_code)


def report_number(world: World, look_in: Sequence[str]) -> Ended:
    """One digit of the data that the page shows."""
    path = needed(world.report, REPORT)
    kept = path.read_bytes()
    path.write_bytes(with_other_digit(kept))
    try:
        words = ("verify", str(path), *look_in)
        return world.shell.sm120(*words, expect=NumberChanged.exit_code)
    finally:
        path.write_bytes(kept)


def with_other_digit(page: bytes) -> bytes:
    """The page, in which one digit of one number is another."""
    found = _NUMBER.search(page)
    assert found, "the page embeds no number"
    at = found.start(1)
    return page[:at] + (b"1" if page[at : at + 1] != b"1" else b"2") + page[at + 1 :]


def proved_titles(tree: dict[str, Any]) -> list[str]:
    """The parts of a walk that people ask for, in its order."""
    titles: dict[str, None] = {}
    for node in _nodes(tree):
        if found := _SHOWN.match(node["title"]):
            titles[found[1]] = None
    return list(titles)


def _nodes(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield tree
    for child in tree.get("children", ()):
        yield from _nodes(child)


BREAKS: dict[str, Callable[[World, Sequence[str]], Ended]] = {
    "a number in the report": report_number,
    "a patch": edited_patch,
    "a tag": moved_tag,
    "a host setting": host_setting,
    "a weight's byte": weight_byte,
}
