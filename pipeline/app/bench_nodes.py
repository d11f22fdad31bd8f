"""`bench run RECIPE --on slurm`: each workload is measured on a node that serves the recipe alone.

A job gets a whole node: whatever else ran there would be in the numbers. It serves the recipe,
measures, stops what it started, and sends the run with every raw request and the facts of the node.
This machine computes the numbers again from the requests before it keeps anything. A workload is
never split: a run whose cells come from different nodes would be of no host.
"""

from __future__ import annotations

import base64
import re
import shutil
import socket
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pipeline.app.bench import BenchRequest, OnRun, chosen_workloads, measure_server
from pipeline.app.host import read_host_facts
from pipeline.app.on_slurm import NodeReply, SlurmNodes, SlurmOrder
from pipeline.app.serve import ServeRequest, serve_recipe, stop_recipes
from pipeline.app.signing import Signing
from pipeline.app.statements import state_benchmark
from pipeline.app.workspace import Workspace
from pipeline.core import log
from pipeline.core.errors import PipelineError, RunInvalid, SlurmUnavailable, WorkloadInvalid
from pipeline.core.files import (
    os_errors_explained,
    sha256_of_file,
    unpacked_whole,
    write_bytes,
)
from pipeline.core.model import canonical_json, sha256_of
from pipeline.images.gate.smem.results import CaseReply
from pipeline.images.gate.smem.run import AnswerTarget
from pipeline.serving.bench.model import BenchRun
from pipeline.serving.bench.place import REQUESTS_FILE, RUN_FILE, is_run
from pipeline.serving.bench.record import read_run, workload_digest
from pipeline.serving.bench.results.recompute import require_as_measured
from pipeline.serving.bench.workload import Workload
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.serve.run import recipe_digest

# Of a file that a node sends, unpacked: text of requests packs to a tenth.
_MOST_BYTES = 1 << 30


class MeasuredRun(CaseReply):
    """A run that a node measured."""

    ended: Literal["measured", "died"]
    node: str = ""
    files: dict[str, str] = {}  # contents by name, packed by zlib, in base64


@dataclass(frozen=True)
class BenchCase:
    """A workload to measure a recipe by."""

    workload: Workload
    timeout_s: int = 0  # none is known to take longer than the others

    @property
    def name(self) -> str:
        return self.workload.name


@dataclass(frozen=True)
class BenchTarget(AnswerTarget[BenchCase, MeasuredRun]):
    """Runs of a recipe; only their folder keeps them, so that users can delete one."""

    recipe: Recipe
    out: Path

    @property
    def answer_type(self) -> type[MeasuredRun]:
        return MeasuredRun

    @property
    def digests(self) -> dict[str, str]:
        return {"recipe": recipe_digest(self.recipe)}

    def key(self, case: BenchCase) -> str:
        """The recipe, which names its image and weights, and what is asked of it."""
        return sha256_of(canonical_json({**self.digests, "bench": workload_digest(case.workload)}))

    def is_about(self, case: BenchCase, run: BenchRun) -> bool:
        """Whether a run is complete, and measured this recipe with this workload."""
        asked = (workload_digest(case.workload), self.digests["recipe"], "complete")
        own = workload_digest(run.workload)
        return (run.inputs.workload, run.inputs.recipe, run.state) == asked and own == asked[0]

    def unpack(self, answer: MeasuredRun, folder: Path) -> Path:
        """Writes what a node sent; returns the file with its facts."""
        facts = f"host-{answer.node}.json"
        if not re.fullmatch(r"\w[\w.-]{0,252}", answer.node):
            raise RunInvalid(f"{answer.node!r}: is no name of a node")
        if {*answer.files} != {RUN_FILE, REQUESTS_FILE, facts}:
            raise RunInvalid(f"{answer.node} sent other files than those of a run")
        for name, text in answer.files.items():
            try:
                data = unpacked_whole(base64.b64decode(text, validate=True), _MOST_BYTES)
            except ValueError as error:
                message = f"{name} of {answer.node}: cannot be unpacked: {error}"
                raise RunInvalid(message) from error
            write_bytes(folder / name, data)
        return folder / facts

    def fits(self, case: BenchCase, answer: MeasuredRun) -> bool:
        """Whether the numbers follow from the requests, and are bound to the node's facts."""
        with tempfile.TemporaryDirectory() as place:
            try:
                facts = self.unpack(answer, Path(place))
                run = read_run(Path(place))
                require_as_measured(Path(place), run)
            except PipelineError as error:
                log.say(f"  {case.name}: {error}")
                return False
            is_bound = run.inputs.host == sha256_of_file(facts)
        return answer.case == case.name and is_bound and self.is_about(case, run)

    def keep(self, case: BenchCase, answer: MeasuredRun) -> None:
        """Puts a run where a local one would be, whole or not at all."""
        with os_errors_explained(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
            place = Path(tempfile.mkdtemp(prefix=".arriving-", dir=self.out))
            try:
                facts = self.unpack(answer, place)
                facts.replace(self.out / facts.name)
                place.chmod(0o755)
                place.rename(self.out / case.name)
            finally:
                shutil.rmtree(place, ignore_errors=True)


def measure_on_nodes(
    workspace: Workspace, request: BenchRequest, slurm: SlurmOrder, on_run: OnRun | None = None
) -> list[BenchRun]:
    """Let nodes measure a recipe, each workload in a job of its own, and state each run."""
    signing = Signing()  # first: a key that cannot be read must not be found out after an hour
    recipe, workloads = chosen_workloads(workspace, request)
    if recipe is None:
        raise WorkloadInvalid(
            f"{request.target}: nodes measure what they serve themselves",
            "Name the recipe in place of the address.",
        )
    target = BenchTarget(workspace.store(), recipe, request.out)
    cases, missing = [BenchCase(each) for each in workloads.values()], list[BenchCase]()
    for case in cases:
        folder = request.out / case.name
        if not folder.exists():
            missing.append(case)
        elif not (is_run(folder) and target.is_about(case, read_run(folder))):
            fix = "Name another folder with --output, or delete this one."
            raise RunInvalid(f"{folder}: holds something else than a whole run of this", fix)
    words = ["bench", "answer", request.target]
    words += [word for name in workloads for word in ("--workload", name)]
    words += [word for each in request.folders for word in ("--recipes", str(each.absolute()))]
    given = {**request.changes, "model": request.model, "workers": request.workers}
    given |= {"no_speculation": request.no_speculation, "no_self_test": request.no_self_test}
    given |= {"weights": request.weights, "runtime": request.engine}
    for name, value in given.items():
        if value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}")
            listed = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [] if value is True else [listed]
    nodes = SlurmNodes(
        slurm, words, workspace.checkout().root, "workload", chunk=1, share="--exclusive"
    )
    with log.step(f"Measuring {recipe.name} on nodes"):
        found = {answer.case: answer for answer in nodes.ask(target, missing)}
    runs: list[BenchRun] = []
    for case in cases:
        folder, answer = request.out / case.name, found.get(case.name)
        if answer is None or answer.ended == "measured":
            runs.append(read_run(folder))
            stated = state_benchmark(folder, signing)
            if on_run:
                on_run(runs[-1], folder, stated)
    # the others are there, whatever became of these
    for answer in found.values():
        if answer.ended == "died":
            raise SlurmUnavailable(f"{recipe.name} by {answer.case}: {answer.message}")
    return runs


def answer_benches(
    workspace: Workspace, request: BenchRequest, keys: Sequence[str]
) -> Iterator[NodeReply]:
    """Serve a recipe and measure it by the workloads whose keys were sent; stop it after."""
    # at once: whoever asked counts the time from here, not from the queue
    node = socket.gethostname()
    yield NodeReply(node=node)
    recipe, workloads = chosen_workloads(workspace, request)
    if recipe is None:
        raise WorkloadInvalid(f"{request.target}: is no recipe")
    with tempfile.TemporaryDirectory() as place:
        target, facts = BenchTarget(workspace.store(), recipe, Path(place)), Path(place) / "facts"
        yield NodeReply(about=target.digests)
        cases = {name: BenchCase(each) for name, each in workloads.items()}
        asked = {name: case for name, case in cases.items() if target.key(case) in keys}
        if not asked:
            return
        write_bytes(facts, f"{read_host_facts(None, name=node).model_dump_json()}\n".encode())
        own = replace(request, out=target.out, host_facts=facts)
        # what somebody serves here already is in the way of numbers, and is refused by name
        serve_recipe(
            workspace,
            ServeRequest(
                recipe.name,
                folders=request.folders,
                weights=request.weights,
                engine=request.engine,
            ),
        )
        try:
            for name, case in asked.items():
                measure_server(workspace, replace(own, names=(name,)))
                folder = target.out / case.name
                files = {n: folder / n for n in (RUN_FILE, REQUESTS_FILE)}
                files[f"host-{node}.json"] = facts
                packed = {
                    n: base64.b64encode(zlib.compress(path.read_bytes())).decode()
                    for n, path in files.items()
                }
                answer = MeasuredRun(case=case.name, ended="measured", node=node, files=packed)
                yield NodeReply(key=target.key(case), answer=answer.model_dump(mode="json"))
        finally:
            stop_recipes(workspace, (recipe.name,), engine=request.engine)
