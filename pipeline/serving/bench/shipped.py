"""Workloads by name: those that are shipped, and files of one's own."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from pipeline.core.errors import SpecInvalid, WorkloadInvalid, did_you_mean
from pipeline.core.files import read_limited
from pipeline.core.yaml_file import MAX_FILE_BYTES, parse_yaml
from pipeline.serving.bench.workload import FilePrompts, Workload

FOLDER = Path(__file__).parent / "workloads"


def shipped_names() -> list[str]:
    """All that are shipped, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def workload_path(name: str) -> Path:
    """The file of a workload: a name of ours, or a path that ends in .yaml."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name in shipped_names():
        return FOLDER / f"{name}.yaml"
    near = did_you_mean(get_close_matches(name, shipped_names(), n=1))
    raise WorkloadInvalid(
        f"there is no workload {name!r} (there are: {', '.join(shipped_names())})",
        f"{near}Name one of them, or a file that ends in .yaml.",
    )


def read_workload(name: str) -> Workload:
    """A workload by name or file."""
    path = workload_path(name)
    data = read_limited(path, MAX_FILE_BYTES, WorkloadInvalid)
    try:
        workload = parse_yaml(data, Workload, path)
    except SpecInvalid as error:
        raise WorkloadInvalid(str(error)) from error
    if path.parent == FOLDER and workload.name != path.stem:
        raise WorkloadInvalid(f"{path}: name: is {workload.name!r}, the file is {path.name}")
    return workload


def prompt_file(name: str, workload: Workload) -> Path | None:
    """Where the prompts of a workload lie: beside its file."""
    prompts = workload.prompts
    if not isinstance(prompts, FilePrompts):
        return None
    return workload_path(name).resolve().parent / prompts.path
