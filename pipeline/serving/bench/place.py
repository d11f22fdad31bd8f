"""The files of a run by name, without reading them."""

from __future__ import annotations

from pathlib import Path

from pipeline.core.errors import RunInvalid
from pipeline.core.files import sha256_of_file

RUN_FILE, REQUESTS_FILE = "bench.json", "requests.jsonl"
MOST_REQUESTS_BYTES = 8 << 30  # some million requests with 2,000 tokens each


def run_folder(path: Path) -> Path:
    """The folder of a run, from the path of the folder or of its file."""
    return path.parent if path.name == RUN_FILE else path


def is_run(path: Path) -> bool:
    """Whether a path names a run of ours, and not the result of another program."""
    return (run_folder(path) / RUN_FILE).is_file() and (path.is_dir() or path.name == RUN_FILE)


def requests_of(folder: Path) -> Path | None:
    """The raw requests of a run; none where the file is missing."""
    path = folder / REQUESTS_FILE
    return path if path.is_file() else None


def requests_digest(folder: Path, most_bytes: int) -> str | None:
    """The digest of the raw requests; none if the file is missing.

    Does not read a file that is larger than the run claims: it may be sparse and of any size.
    """
    path = requests_of(folder)
    if path is None:
        return None
    if (size := path.stat().st_size) > min(most_bytes, MOST_REQUESTS_BYTES):
        raise RunInvalid(f"{path}: has {size} bytes, the run names {most_bytes} of them")
    return sha256_of_file(path)


def require_plain_file(path: Path) -> None:
    """Refuse a pipe or a device, which may never end; the reader reports a missing file."""
    if path.exists() and not path.is_file():
        raise RunInvalid(f"{path}: is not a plain file")


def runs_in(path: Path) -> list[Path]:
    """The runs that a path names: itself, or those in a folder that `bench --output` made."""
    if is_run(path):
        return [run_folder(path)]
    return sorted(file.parent for file in path.glob(f"*/{RUN_FILE}")) if path.is_dir() else []
