"""A run on a disk: a folder with `bench.json` and every raw request beside it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.core import log
from pipeline.core.errors import RunInvalid
from pipeline.core.files import atomic_file, locked, os_errors_explained, read_limited
from pipeline.core.foreign_json import JsonInvalid, read_json
from pipeline.core.model import canonical_json, sha256_of
from pipeline.serving.bench.model import BenchRun, RequestLines, RequestRow
from pipeline.serving.bench.place import REQUESTS_FILE, RUN_FILE, require_plain_file, run_folder
from pipeline.serving.bench.workload import Workload

_MOST_RUN_BYTES = 256 << 20
_MOST_LINE_BYTES = 64 << 20
_LOCK = ".measuring"


def read_run(path: Path) -> BenchRun:
    """Reads a run from its folder or file, without its requests."""
    file = run_folder(path) / RUN_FILE
    return run_of(file, read_run_value(file)[1])


def run_of(file: Path, value: Any) -> BenchRun:
    """Checks the value of a run's file."""
    try:
        return BenchRun.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise RunInvalid(f"{file}: {field}: {first['msg']}") from error


def read_run_value(file: Path) -> tuple[bytes, Any]:
    """The bytes of a run's file and their JSON, which may still be no run."""
    require_plain_file(file)
    data = read_limited(file, _MOST_RUN_BYTES, RunInvalid)
    try:
        return data, read_json(data, most_bytes=_MOST_RUN_BYTES)
    except JsonInvalid as error:
        raise RunInvalid(f"{file}: {error}") from error


def workload_digest(workload: Workload) -> str:
    """The digest of what was asked."""
    return sha256_of(canonical_json(workload.model_dump(mode="json")))


def run_bytes(run: BenchRun) -> bytes:
    """The exact bytes of `bench.json`: a statement names their digest."""
    return canonical_json(log.redacted(run.model_dump(mode="json"))) + b"\n"


def write_run(folder: Path, run: BenchRun) -> None:
    """Writes a run whole or not at all: this happens after each trial."""
    with atomic_file(folder / RUN_FILE) as out:
        out.write(run_bytes(run))


class StoredRows:
    """The requests of a trial as they are on the disk now, hashed while they are read."""

    def __init__(self, folder: Path, lines: RequestLines) -> None:
        self._path, self._lines, self._sha = folder / REQUESTS_FILE, lines, hashlib.sha256()

    def __iter__(self) -> Iterator[RequestRow]:
        path, left, number = self._path, self._lines.bytes, 0
        require_plain_file(path)
        try:
            with path.open("rb") as file:
                file.seek(self._lines.first_byte)
                while left > 0 and (line := file.readline(min(left, _MOST_LINE_BYTES))):
                    left, number = left - len(line), number + 1
                    self._sha.update(line)
                    yield RequestRow.model_validate_json(line)
        except OSError as error:
            raise RunInvalid(f"{path}: cannot be read: {error.strerror}") from error
        except ValidationError as error:
            why = f"is not a request: {error.errors()[0]['msg']}"
            raise RunInvalid(f"{path}: line {number} of the trial {why}") from error

    @property
    def digest(self) -> str:
        return f"sha256:{self._sha.hexdigest()}"


def read_request_rows(folder: Path, lines: RequestLines) -> Iterator[RequestRow]:
    """Reads the requests of a trial; refuses them at the end if they are not those of the run."""
    rows = StoredRows(folder, lines)
    yield from rows
    if rows.digest != lines.digest:
        raise RunInvalid(f"{folder / REQUESTS_FILE}: holds other requests than the run names")


@contextmanager
def measured_alone(folder: Path) -> Iterator[None]:
    """Locks a folder: two programs would overwrite each other's requests."""
    busy = RunInvalid(
        f"{folder}: another `sm120 bench` is measuring into it",
        "Wait until that one has ended, or name another folder with --output.",
    )
    path = folder / _LOCK
    with os_errors_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(path, busy=busy):
        try:
            yield
        finally:
            # no other process waits for the lock, so it need not stay
            path.unlink(missing_ok=True)
            # a run that measured nothing leaves no folder
            with suppress(OSError):
                folder.rmdir()


def append_rows(folder: Path, rows: Iterable[RequestRow], at: int) -> RequestLines:
    """Write the requests of a trial after byte `at`, over those of an interrupted one."""
    path, sha, size, count = folder / REQUESTS_FILE, hashlib.sha256(), 0, 0
    with os_errors_explained(path):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("r+b" if path.exists() else "w+b") as file:
                file.truncate(at)
                file.seek(at)
                for row in rows:
                    # defaults are left out: most requests have neither failure nor retries
                    body = log.redacted(row.model_dump(mode="json", exclude_defaults=True))
                    line = canonical_json(body) + b"\n"
                    sha.update(line)
                    file.write(line)
                    size, count = size + len(line), count + 1
                file.flush()
                # before the run names these lines
                os.fsync(file.fileno())
        except BaseException:
            # discard half a trial; on a full disk the result needs the room
            with suppress(OSError):
                os.truncate(path, at)
            raise
    digest = f"sha256:{sha.hexdigest()}"
    return RequestLines(first_byte=at, bytes=size, lines=count, digest=digest)


def end_of_rows(run: BenchRun) -> int:
    """Where the requests of the next trial begin."""
    return max((lines.first_byte + lines.bytes for lines in all_lines(run)), default=0)


def all_lines(run: BenchRun) -> list[RequestLines]:
    """Every span of the requests that a run names, in the order of the file."""
    named = [
        lines
        for cell in run.cells
        for lines in (*(trial.requests for trial in cell.trials), *cell.repeated)
    ]
    return sorted(named, key=lambda lines: lines.first_byte)
