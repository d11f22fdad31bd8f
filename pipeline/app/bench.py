"""Benchmarks: measure a served recipe or any server, compare results, and state them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.app.recipes import is_address, recipes_of
from pipeline.app.registry import pull
from pipeline.app.serve import (
    RemoteHost,
    ServeContext,
    folder_on,
    machine_of_all,
    machine_on,
    make_job,
)
from pipeline.app.signing import Signing
from pipeline.app.smoke import api_headers, stop_recipe
from pipeline.app.statements import FileStatement, state_benchmark, state_host
from pipeline.app.workspace import Workspace
from pipeline.artifacts.containers.container_engine import Wanted
from pipeline.artifacts.oci.reference import parse_repository
from pipeline.artifacts.registry.access import Access
from pipeline.core import errors, log
from pipeline.core.files import sha256_of_file, write_bytes
from pipeline.core.known import Unknown, then
from pipeline.core.net.wire import Address
from pipeline.hosts.facts.drift import compare_facts, read_recorded_facts
from pipeline.hosts.facts.gather import gather_facts
from pipeline.serving.bench.metrics import DEFINITIONS
from pipeline.serving.bench.model import BenchRun, Inputs
from pipeline.serving.bench.place import is_run, runs_in
from pipeline.serving.bench.record import read_run as read_run
from pipeline.serving.bench.record import workload_digest
from pipeline.serving.bench.results.compare import (
    GATED,
    BenchComparison,
    GateRow,
    judge_gate,
    read_side,
)
from pipeline.serving.bench.results.compare import compare_runs as compare_sides
from pipeline.serving.bench.results.recompute import require_as_measured
from pipeline.serving.bench.runner import Bench, measure_in_turns
from pipeline.serving.bench.server import MeasuredServer
from pipeline.serving.bench.starts import Started, Starter, measure_starts
from pipeline.serving.bench.trace import replayed_sessions
from pipeline.serving.bench.workload import (
    Fixed,
    Load,
    TracePrompts,
    Workload,
    prompt_file,
    read_workload,
)
from pipeline.serving.recipe.model import Recipe, merged_flags
from pipeline.serving.serve.attempts import Begun, ServeOptions
from pipeline.serving.serve.engine_log import start_phases
from pipeline.serving.serve.run import (
    ServedStatus,
    attempts_of,
    find_served,
    new_attempt,
    recipe_digest,
    serve_launch,
    status_of,
)
from pipeline.serving.serve.site import HERE, Site
from pipeline.serving.smoke.client import ChatClient
from pipeline.serving.smoke.ladder import run_ladder
from pipeline.serving.smoke.model import plan_for
from pipeline.serving.smoke.rungs.answers import run_in_sandbox
from pipeline.serving.smoke.rungs.first import FIRST
from pipeline.serving.smoke.session import SmokeSession

_DEFAULT, _TINY = "quick", "tiny"
# Checks of the smoke test's first rung: health, models, one answer.
_UP_TO_AN_ANSWER = 3
# Flags that decide how prompts and decoding share a step of the engine, and what is cached.
_BATCHING = (
    *("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill", "enable_prefix_caching"),
    *("chunked_prefill_size", "max_running_requests", "page_size", "disable_radix_cache"),
    *("batch_size", "ubatch_size", "parallel", "block_size"),
)


@dataclass(frozen=True)
class BenchRequest:
    """What to measure, by which workloads, and where the results go."""

    target: str  # a recipe or an address
    folders: tuple[Path, ...] = ()  # recipes of the user's own
    names: tuple[str, ...] = ()  # workloads; none: what the recipe names
    changes: dict[str, Any] = field(default_factory=dict)  # see `changed`
    model: str | None = None
    no_speculation: bool = False
    workers: int | None = None
    no_self_test: bool = False
    weights: Path | None = None
    pull: str | None = None  # the repository that the image of a recipe is in, for starts
    access: Access | None = None  # to that registry
    host_facts: Path | None = None
    out: Path = Path("bench")
    engine: Wanted = "auto"
    on: RemoteHost | None = None


OnRun = Callable[[BenchRun, Path, FileStatement], None]


def measure_server(
    workspace: Workspace, request: BenchRequest, on_run: OnRun | None = None
) -> list[BenchRun]:
    """Measure a server by each workload, and state each run.

    `on_run` gets each run with its folder and its statement as soon as it is measured.
    """
    signing = Signing()  # first: a key that cannot be read must not be found out after an hour
    recipe, workloads = chosen_workloads(workspace, request)
    if request.pull and not any(workload.starts for workload in workloads.values()):
        raise errors.WorkloadInvalid(
            f"{', '.join(workloads)}: starts no engine, so there is no pull to measure",
            "Name `--workload start` too, or leave --pull out.",
        )
    on, runs = request.on, []
    for name, workload in workloads.items():
        folder = request.out / workload.name
        done = read_run(folder) if workload.engine_starts > 1 and is_run(folder) else None
        asked = (workload_digest(workload), recipe_digest(recipe) if recipe else None, "complete")
        is_done = done and (done.inputs.workload, done.inputs.recipe, done.state) == asked
        if done and is_done and all(cell.state == "good" for cell in done.cells):
            # says so without starting an engine
            require_as_measured(folder, done)
            log.say(f"The run in {folder} is finished: nothing is measured.")
            runs.append(done)
        elif workload.starts:
            if recipe is None:
                raise errors.WorkloadInvalid(
                    "how long a start takes can be measured of a recipe alone",
                    "Name the recipe in place of the address.",
                )
            with _recipe_starter(workspace, recipe, request) as (starter, begun):
                inputs = _inputs(workload, recipe, begun, request, HERE, signing)
                runs.append(measure_starts(workload, starter, folder, inputs))
        else:
            with ExitStack() as stack:
                restart = attempt = served = serve = None
                if workload.engine_starts > 1:
                    if recipe is None:
                        raise errors.WorkloadInvalid(
                            f"{workload.name}: the engine of an address cannot be started anew",
                            "Name the recipe in place of the address, or leave --starts out.",
                        )
                    starting = _recipe_starter(workspace, recipe, request)
                    (starter, serve), site = stack.enter_context(starting), HERE
                    restart = starter.again
                    server = restart()
                else:
                    found = _server_of(workspace, recipe, request.target, request.engine, on)
                    server, served, site = stack.enter_context(found)
                if served:
                    # the serve that started it: what it rests on, by digest
                    attempts = attempts_of(workspace.store_to_read()).read().attempts
                    attempt = next((a for a in attempts if a.begun.id == served.attempt), None)
                serve, known = attempt.begun if attempt else serve, dict[str, Any]()
                if served and not attempt and served.built == "same":
                    # a unit that was deployed: its image was compared with the store's just now
                    known["image"] = served.digest
                if attempt and attempt.ends:
                    known["kernels"] = attempt.ends[0].kernels
                speculates, flags = None, merged_flags(recipe).given() if recipe else {}
                if request.no_speculation:
                    speculates = False
                elif recipe:
                    speculates = bool(recipe.speculation and recipe.speculation.enabled)
                bench = Bench(
                    server=server,
                    restart=restart,
                    workload=workload,
                    folder=folder,
                    inputs=_inputs(workload, recipe, serve, request, site, signing, known),
                    workers=request.workers,
                    self_test=not request.no_self_test,
                    prompt_file=prompt_file(name, workload),
                    model=request.model or (served.model if served else None),
                    speculates=speculates,
                    settings={name: str(flags[name]) for name in _BATCHING if name in flags},
                )
                runs.append(bench.run())
        stated = state_benchmark(folder, signing)
        if on_run:
            on_run(runs[-1], folder, stated)
    return runs


def require_good(runs: Sequence[BenchRun]) -> None:
    """Raise BenchVoid where a cell is void."""
    void = [
        f"{run.workload.name} {cell.cell.name}"
        for run in runs
        for cell in run.cells
        if cell.state == "void"
    ]
    if not void:
        return
    trials = [t for run in runs for cell in run.cells for t in cell.trials if t.void]
    hint = ""
    # only where nothing but repeated text is the reason
    if all(trial.metrics.looping and not trial.metrics.failed for trial in trials):
        hint = (
            "The model repeats itself. --allow-loops counts such answers and marks them; for a"
            " model that can only recite, --workload tiny does so too."
        )
    raise errors.BenchVoid(f"{log.count(len(void), 'cell')} void: {', '.join(void)}", hint)


def chosen_workloads(
    workspace: Workspace, request: BenchRequest
) -> tuple[Recipe | None, dict[str, Workload]]:
    """Read the recipe (none for an address) and the workloads, with the user's changes."""
    recipe = None
    if not is_address(request.target):
        recipe = recipes_of(workspace, request.folders).read(request.target)
    named: Sequence[str] = request.names or [_DEFAULT]
    if recipe and not request.names:
        named = recipe.bench or [_TINY if recipe.model.tiny else _DEFAULT]
    workloads = {name: changed_workload(read_workload(name), **request.changes) for name in named}
    for name, workload in workloads.items():
        _require_trace(name, workload)
    return recipe, workloads


def _require_trace(name: str, workload: Workload) -> None:
    """Refuse a trace that cannot be replayed, before asking or starting a server."""
    path = prompt_file(name, workload)
    if path and isinstance(workload.prompts, TracePrompts):
        most = max((load.requests for load in workload.loads), default=0)
        replayed_sessions(path, workload.prompts, most)


@contextmanager
def _server_of(
    workspace: Workspace, recipe: Recipe | None, target: str, engine: Wanted, on: RemoteHost | None
) -> Iterator[tuple[MeasuredServer, ServedStatus | None, Site]]:
    """Yield the server to measure while the block lasts: an address, or a recipe's."""
    if recipe is None:
        yield MeasuredServer(Address.read(target), target, api_headers()), None, HERE
        return
    with machine_of_all(workspace, on, engine) as (site, engines):
        store = workspace.store_to_read()
        found = [row for each in engines for row in status_of(each, store, site)]
        served = next((row for row in found if row.recipe == recipe.name and row.healthy), None)
        if served is None or served.port is None:
            where = on.host if on else "this machine"
            raise errors.NothingServed(
                f"{recipe.name}: is not served on {where}, or does not answer"
            )
        url, door = f"http://127.0.0.1:{served.port}", site.door(served.port)
        address = Address.read(url)
        if isinstance(door, Path):
            address, url = replace(address, socket=door), f"{url} on {site.host}, through SSH"
            log.say(
                f"Requests go through the SSH connection to {site.host}, which adds to each"
                " latency: serve with --lan and measure the address to leave SSH out."
            )
        yield MeasuredServer(address, url, api_headers()), served, site


def _inputs(
    workload: Workload,
    recipe: Recipe | None,
    begun: Begun | None,
    request: BenchRequest,
    site: Site,
    signing: Signing,
    known: dict[str, Any] | None = None,  # what is known besides, by the names of inputs
) -> Inputs:
    """Collect what the numbers rest on; ask another host for its facts, and keep them."""
    digests: dict[str, Any] = {"host": None, **(known or {})}
    path = request.host_facts
    # any other file's digest would say nothing of a host
    given = read_recorded_facts(path) if path else None
    if site.host:
        with log.step(f"Reading the facts of {site.host}"):
            now = then(site.captured(), lambda found: gather_facts(found, site.host))
        if isinstance(now, Unknown):
            log.say(f"No facts of {site.host} are bound to the numbers: {now.unknown}")
        elif given:
            moved = compare_facts(given, now.model_copy(update={"host": given.host}))
            if changed := [each for each in moved if each.kind == "changed"]:
                raise errors.HostDrifted(
                    f"{path}: is not what {site.host} is now: {changed[0].field} was"
                    f" {changed[0].before}, is {changed[0].after}",
                    "Leave --host-facts out: the host is asked for its own.",
                )
        else:
            path = request.out / f"host-{site.host.rpartition('@')[2]}.json"
            # the same file where nothing moved, so that a run that was stopped can go on
            if not path.exists() or compare_facts(read_recorded_facts(path), now):
                write_bytes(path, (now.model_dump_json(indent=2) + "\n").encode())
                stated = state_host(path, signing)
                log.say(f"statement: {stated.file}, {stated.state}")
    if path:
        digests["host"] = sha256_of_file(path)
    if begun:
        digests |= {
            "image": begun.image_digest,
            "weights": begun.weights_digest,
            "recipe": begun.recipe_digest,
        }
    return Inputs(
        workload=workload_digest(workload),
        recipe_name=recipe.name if recipe else None,
        host_name=site.host or None,
        **digests,
    )


def changed_workload(
    workload: Workload,
    *,
    concurrency: list[int] | None = None,
    rate: list[float] | None = None,
    requests: int | None = None,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
    repeats: int | None = None,
    starts: int | None = None,
    allow_loops: bool = False,
) -> Workload:
    """Replace a workload's values with the ones typed; this changes its digest."""
    values: dict[str, Any] = {}
    if concurrency and rate:
        raise errors.WorkloadInvalid("--concurrency and --rate: name one of them")
    if concurrency:
        # a reader stays beside them
        reads = next((load.reads for load in workload.loads if load.reads), None)
        each_n = [(n, requests or (n if reads else 4 * n)) for n in concurrency]
        values["loads"] = [Load(concurrency=n, requests=m, reads=reads) for n, m in each_n]
    elif rate:
        # a minute of each
        counts = {each: requests or max(1, round(60 * each)) for each in rate}
        values["loads"] = [Load(rate_per_s=each, requests=counts[each]) for each in rate]
    elif requests:
        values["loads"] = [x.model_copy(update={"requests": requests}) for x in workload.loads]
    if input_tokens:
        values["input"] = Fixed(tokens=input_tokens)
    if output_tokens:
        values["output"] = Fixed(tokens=output_tokens)
    values |= {"repeats": repeats} if repeats else {}
    if starts and starts > 1:
        # every start has as many, so that none counts more than another
        each = -(-(repeats or workload.repeats) // starts)
        values |= {"engine_starts": starts, "repeats": each * starts}
        if workload.starts or (repeats and repeats % starts):
            if workload.starts:
                raise errors.WorkloadInvalid(
                    f"{workload.name}: starts the engine itself, so --starts does not apply",
                    "Leave --starts out: --repeats says how often it is started.",
                )
            raise errors.WorkloadInvalid(
                f"{workload.name}: {repeats} repeats cannot be shared by {starts} starts",
                f"Make --repeats a multiple of --starts, such as {each * starts}, or leave it out.",
            )
    values |= {"looping": "mark"} if allow_loops else {}
    if not values:
        return workload
    own = [name for name in ("input", "output") if name in values]
    if own or concurrency or rate:
        # the shipped text about lengths and loads is not true any more
        now = {name: values.get(name) or getattr(workload, name) for name in ("input", "output")}
        words = [f"{n}: {each.model_dump_json()}" for n, each in now.items() if each]
        fixed = {n: each.tokens for n, each in now.items() if isinstance(each, Fixed)}
        if len(fixed) == 2:
            words = [f"{fixed['input']} tokens in and {fixed['output']} out"]
        words += [f"concurrency {', '.join(map(str, concurrency))}"] if concurrency else []
        words += [f"{', '.join(f'{each:g}' for each in rate)} requests a second"] if rate else []
        values["summary"] = f"{workload.name} with {', '.join(words)}"
    if own and any(load.input or load.output for load in workload.loads):
        raise errors.WorkloadInvalid(f"{workload.name}: each of its cells has lengths of its own")
    return Workload.model_validate({**workload.model_dump(), **values})


@contextmanager
def _recipe_starter(
    workspace: Workspace, recipe: Recipe, request: BenchRequest
) -> Iterator[tuple[Starter, Begun]]:
    """Yield a starter for a recipe; restore the machine's state at the end."""
    options, name = ServeOptions(weights=folder_on(None, request.weights, "--weights")), recipe.name
    with machine_on(workspace, None, request.engine, name) as (site, containers):
        context = ServeContext(workspace.checkout(), workspace.store(), options, site)
        job = make_job(context, recipe)
        if job.weights is None:
            raise errors.WorkloadInvalid(
                f"{name}: its weights are in no folder that is known here",
                "--weights DIR names it: the engine is started with them, cold or warm.",
            )

        def start() -> Started:
            pull_s, pull_began = None, time.monotonic()
            if request.pull and job.record:
                ids = (job.record.config, job.record.digest)
                if any(map(containers.image, ids)):
                    log.say(f"The pull is not measured: {name}'s image is loaded on this machine")
                else:
                    # pulls the image that is served, though the store has it
                    place = f"{parse_repository(request.pull)}@{job.record.digest}"
                    with context.store.scratch() as scratch:
                        pull(place, scratch / "image", access=request.access)
                        pull_s = time.monotonic() - pull_began
            begun = new_attempt(job)
            with context.store.in_use():
                served = serve_launch(containers, context.store, job, begun)
            url = served.url.removesuffix("/v1")
            server = MeasuredServer(Address.read(url), url, api_headers())
            phases = start_phases(attempts_of(context.store).log_path(begun.id))
            plan = plan_for(recipe).model_copy(update={"model": served.model})

            def check() -> None:
                session = SmokeSession(
                    ChatClient(server.address, plan.limits, api_headers()), plan, run_in_sandbox
                )
                # up to the first whole answer: what follows in the rung is about limits and counts
                asked = replace(FIRST, parts=FIRST.parts[:_UP_TO_AN_ANSWER])
                result = asyncio.run(run_ladder(session, url, (asked,)))
                if failures := result.failures():
                    text = f"{failures[0].name}: {failures[0].message[:300]}"
                    raise errors.SmokeFailed(f"{url}: its first answer is wrong: {text}")

            times = (served.seconds, phases, check, pull_s, pull_began)
            return Started(server, served.model, *times)

        def is_served() -> bool:
            # then people may use it
            with suppress(errors.NothingServed):
                return find_served(containers, name).running
            return False

        stop, was_served = partial(stop_recipe, containers, context, recipe), is_served()
        if was_served:
            log.say(f"{name} is served now: it is ended, as its start is to be measured")
        if not request.pull:
            where = "--pull REGISTRY/REPO says where it is published"
            log.say(f"The pull of its image is not measured: {where}")
        try:
            yield Starter(start, stop, job.weights.folder), new_attempt(job)
        finally:
            if not was_served:
                stop()
            elif is_served():
                log.say(
                    f"{name} is served again, as the recipe says and without options that it was"
                    f" served with before; `sm120 recipe stop {name}` ends it"
                )
            else:
                log.say(f"{name} is not served any more; `sm120 serve {name}` starts it")


def measure_two(
    urls: tuple[str, str], workload_name: str = "quick", repeats: int = 8, out: Path = Path("bench")
) -> list[Path]:
    """Measure two servers in turns, one trial each; returns the folders of both runs, stated."""
    signing = Signing()
    workload = read_workload(workload_name).model_copy(update={"repeats": repeats})
    _require_trace(workload_name, workload)
    first, second = (
        Bench(
            server=MeasuredServer(Address.read(url), url, api_headers()),
            workload=workload,
            folder=out / side / workload.name,
            inputs=Inputs(workload=workload_digest(workload)),
            prompt_file=prompt_file(workload_name, workload),
        )
        for side, url in zip(("first", "second"), urls, strict=True)
    )
    measure_in_turns(first, second)
    for bench in (first, second):
        state_benchmark(bench.folder, signing)
    return [first.folder, second.folder]


def compare_results(
    first: Path,
    second: Path,
    least: float | None = None,
    *,
    gate: bool = False,
    allow: float = 5.0,
    metrics: Sequence[str] = (),
) -> tuple[BenchComparison, list[GateRow], errors.PipelineError | None]:
    """Say what changed between two results; with `gate`, judge each gated number.

    The error is BenchWorse or BenchUndecided where the gate did not pass.
    """
    comparison = compare_sides(read_side(first), read_side(second), least)
    rows = judge_gate(comparison, allow, metrics or GATED) if gate else []
    # one number that is surely worse outweighs all that are undecided
    for verdict, kind in (("worse", errors.BenchWorse), ("undecided", errors.BenchUndecided)):
        found = [row for row in rows if row.verdict == verdict]
        if found or (gate and verdict == "undecided" and not rows):
            why = f"{found[0].cell} {found[0].number}: {found[0].message}" if found else "no cell"
            error = kind(f"{comparison.second} against {comparison.first}: {why}")
            return comparison, rows, error
    return comparison, rows, None


def require_metrics(names: Sequence[str]) -> None:
    """Refuse a number that can be neither better nor worse."""
    for name in names:
        definition = DEFINITIONS.get(name.partition(".")[0])
        if definition is None or definition.better == "none":
            raise errors.InputInvalid(
                f"{name}: is no number that can be better or worse",
                "Write it as output_tok_s, ttft_ms.mean or tpot_ms.p99.",
            )


def attest_results(runs: Sequence[Path]) -> list[FileStatement]:
    """State and sign results that were measured without a key."""
    signing, stated = Signing(), []
    # a path without a run goes on as it is: its error says what is missing
    for folder in (each for path in runs for each in runs_in(path) or [path]):
        # what does not follow from its requests is not signed
        require_as_measured(folder, read_run(folder))
        stated.append(state_benchmark(folder, signing, must_write=True))
    return stated
