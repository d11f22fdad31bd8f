"""What is in an image is what `pip install` of the same lock makes.

By default for the small image on both platforms; `pytest --big` does it for the engines too
(about 25 GB of disk and several minutes).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.artifacts.oci.record import FileRow
from pipeline.artifacts.store.store import Store
from pipeline.images.assemble.layer import read_layer_file
from pipeline.images.lock.make import tag_ranks
from tests.integration.built import Built, build_image, sm120

VENV = "opt/venv/"
SITE = "opt/venv/lib/python3.11/site-packages/"

# Every difference there may be, and why.
EXPLAINED = {
    "INSTALLER": "names the installer, which is another one",
    "REQUESTED": "pip marks what was named on its command line; nobody typed one here",
    "RECORD": "compared row by row instead of byte by byte",
    "script": "a launcher's text differs; it must start the same function",
    "skeleton": "the environment's own pyvenv.cfg and interpreter links",
    "patched": "the image's patches change it, as series.yaml says",
    "contested": "two wheels write it; the spec says which wins, pip takes the last",
}


@dataclass(frozen=True)
class Tree:
    """Files by path below the environment, with a way to read one."""

    rows: dict[str, tuple[FileRow, str]]
    store: Store

    def read(self, path: str) -> bytes:
        row, digest = self.rows[path]
        return read_layer_file(self.store.blob_path(digest), row)


def image_tree(image: Built) -> Tree:
    """The environment as a container would see it: the last layer that has a path wins."""
    store = Store(image.store)
    record = store.image_record(image.name, image.platform)
    assert record is not None
    rows: dict[str, tuple[FileRow, str]] = {}
    for layer in record.layers:
        digest = layer.record.digest
        for row in store.contents(layer.record):
            if row.path.startswith(VENV) and row.kind != "dir":
                rows[row.path] = (row, digest)
    return Tree(rows, store)


def pip_install(image: Built, folder: Path, ours: Tree) -> dict[str, Path]:
    """Install the exported lock with pip for the image's platform; paths as in the image."""
    wheels, target = folder / "wheels", folder / "target"
    sm120(
        image.store,
        "image",
        "collect",
        image.name,
        "--platform",
        image.platform,
        "--output",
        str(wheels),
    )
    exported = sm120(
        image.store,
        "image",
        "lock",
        image.name,
        "--platform",
        image.platform,
        "--export",
        "requirements",
    )
    (folder / "requirements.txt").write_text(exported.stdout, encoding="utf-8")
    platforms = {t.platform for t in tag_ranks("3.11", image.platform)} - {"any"}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--no-index", "--find-links", str(wheels), "--require-hashes", "--isolated"]
    command += ["--only-binary", ":all:", "--python-version", "3.11", "--implementation", "cp"]
    command += ["--target", str(target), "-r", str(folder / "requirements.txt")]
    command += [f"--abi={abi}" for abi in ("cp311", "abi3", "none")]
    command += [f"--platform={p}" for p in sorted(platforms)]
    subprocess.run(command, check=True)
    files = [p for p in target.rglob("*") if not p.is_dir()]
    return {placed(str(p.relative_to(target)), ours): p for p in files}


def placed(path: str, ours: Tree) -> str:
    """`pip --target` keeps scripts and data beside the packages; the image has them apart."""
    return VENV + path if VENV + path in ours.rows else SITE + path


def explanation(path: str, patched: set[str], contested: set[str]) -> str:
    """Why a path may differ, or nothing."""
    name = path.rpartition("/")[2]
    if ".dist-info/" in path and name in ("INSTALLER", "REQUESTED", "RECORD"):
        return name
    if path.startswith(f"{VENV}bin/"):
        return "script"
    if path in patched:
        return "patched"
    return "contested" if path in contested else ""


def record_rows(text: str) -> dict[str, str]:
    """RECORD as {path: hash}, without the rows that name what is explained elsewhere."""
    rows = {r[0]: r[1] for r in csv.reader(io.StringIO(text)) if r}
    skip = re.compile(
        r"(INSTALLER|REQUESTED|RECORD|direct_url\.json)$|^(\.\./)+|^bin/|^share/|^etc/"
    )
    return {path: value for path, value in rows.items() if not skip.search(path)}


def script_target(text: str) -> str:
    """Which function a console script starts."""
    found = re.search(r"^\s*from ([\w.]+) import (\w+)", text, re.M)
    return f"{found[1]}:{found[2]}" if found else text.partition("\n")[2]


def patched_paths(image: Built) -> set[str]:
    folder = Store(image.store).image_folder(image.name, image.platform)
    diff = (folder / "patches.diff").read_text(encoding="utf-8")
    return {SITE + p for p in re.findall(r"^\+\+\+ b/(\S+)", diff, re.M)}


def contested_paths(image: Built) -> set[str]:
    """Paths that several wheels of the image claim, by their RECORDs."""
    tree, seen, twice = image_tree(image), set[str](), set[str]()
    for path in tree.rows:
        if path.endswith(".dist-info/RECORD"):
            names = set(record_rows(tree.read(path).decode()))
            twice |= names & seen
            seen |= names
    return {SITE + p for p in twice}


def compare(image: Built, folder: Path) -> list[str]:
    """Every difference that is not explained."""
    ours = image_tree(image)
    theirs = pip_install(image, folder, ours)
    patched, contested = patched_paths(image), contested_paths(image)
    skeleton = {f"{VENV}pyvenv.cfg", f"{VENV}lib64"}
    skeleton |= {f"{VENV}bin/{n}" for n in ("python", "python3", "python3.11")}
    problems = []
    for path in sorted((ours.rows.keys() - skeleton) | theirs.keys()):
        why = explanation(path, patched, contested)
        if path not in theirs or path not in ours.rows:
            if why != "REQUESTED":
                problems.append(f"only {'in the image' if path in ours.rows else 'by pip'}: {path}")
        elif why == "RECORD":
            problems += compare_records(path, ours, theirs[path], patched)
        elif why == "script":
            problems += compare_scripts(path, ours, theirs[path])
        elif not why:
            problems += compare_files(path, ours.rows[path][0], theirs[path])
    return problems


def compare_files(path: str, row: FileRow, theirs: Path) -> list[str]:
    with theirs.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != row.sha256:
        return [f"other bytes: {path}"]
    if bool(row.mode & 0o111) != os.access(theirs, os.X_OK):
        return [f"other mode: {path}"]
    return []


def compare_records(path: str, ours: Tree, theirs: Path, patched: set[str]) -> list[str]:
    one = record_rows(ours.read(path).decode())
    other = record_rows(theirs.read_text(encoding="utf-8"))
    wrong = [p for p in one.keys() | other.keys() if one.get(p) != other.get(p)]
    # wheels published with an untrue RECORD: ours tells the truth, pip copies the lie
    return [
        f"RECORD of {path}: {p}"
        for p in wrong
        if SITE + p not in patched and not is_true(ours, p, one.get(p, ""))
    ]


def is_true(tree: Tree, path: str, promised: str) -> bool:
    """Whether our RECORD row is what the file in the image hashes to."""
    row = tree.rows.get(SITE + path)
    if row is None or not promised.startswith("sha256="):
        return False
    packed = base64.urlsafe_b64encode(bytes.fromhex(row[0].sha256)).decode().rstrip("=")
    return promised == f"sha256={packed}"


def compare_scripts(path: str, ours: Tree, theirs: Path) -> list[str]:
    if ours.rows[path][0].mode != 0o755:
        return [f"not executable: {path}"]
    mine, other = ours.read(path), theirs.read_bytes()
    if mine == other:
        return []
    if script_target(mine.decode()) != script_target(other.decode()):
        return [f"starts something else: {path}"]
    return []


@pytest.mark.parametrize("platform", ["linux/amd64", "linux/arm64"])
def test_the_small_image_holds_what_pip_installs(
    small_store: Path, tmp_path: Path, platform: str
) -> None:
    image = build_image(small_store, "llama-cpp-cpu", platform)
    assert compare(image, tmp_path) == []


@pytest.mark.parametrize("name", ["sglang-k2", "sglang", "vllm"])
def test_an_engine_image_holds_what_pip_installs(
    name: str, tmp_path: Path, big_store: Path
) -> None:
    image = build_image(big_store, name, "linux/amd64")
    assert compare(image, tmp_path) == []


def test_a_planted_difference_is_found(small_store: Path, tmp_path: Path) -> None:
    image = build_image(small_store, "llama-cpp-cpu", "linux/amd64")
    ours = image_tree(image)
    pip_install(image, tmp_path, ours)
    path = f"{SITE}xllamacpp/__init__.py"
    changed = tmp_path / "target" / "xllamacpp" / "__init__.py"
    changed.write_bytes(changed.read_bytes() + b"#")
    assert compare_files(path, ours.rows[path][0], changed) == [f"other bytes: {path}"]
    changed.write_bytes(ours.read(path))
    changed.chmod(0o755)
    assert compare_files(path, ours.rows[path][0], changed) == [f"other mode: {path}"]
