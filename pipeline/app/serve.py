"""Serve recipes: start one, look at what is served, read its log, stop it.

Turns a recipe and a user's options into a job for a container engine, on this machine or another
host, with everything looked up.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from pipeline.app.images import find_image
from pipeline.app.recipes import all_overrides, recipes_of, say_contrary
from pipeline.app.signing import trust_of
from pipeline.app.workspace import Workspace, host_platform, pick_platform
from pipeline.artifacts.attest.envelope import SUFFIX
from pipeline.artifacts.containers.container_engine import (
    ContainerEngine,
    Wanted,
    find_engine,
    find_engines,
    titles,
)
from pipeline.artifacts.containers.docker import default_tag
from pipeline.artifacts.containers.facts import other_owner
from pipeline.artifacts.store.store import Store
from pipeline.core import errors, log
from pipeline.core.known import Known, Unknown, first_unknown, then, unknown
from pipeline.core.model import sha256_of
from pipeline.core.verdict import RuleResult
from pipeline.evidence.statements.evidence_set import statements_folder
from pipeline.hosts.fleet.playbook import connection_of
from pipeline.hosts.fleet.tunnel import Tunnel, open_tunnel, plain_connection
from pipeline.images.assemble.image import Built
from pipeline.images.engine.parser_flags import find_parser_flags, flags_folder
from pipeline.images.gate.evidence import Evidence, read_evidence
from pipeline.images.gate.parsers.cases import read_parser_gates
from pipeline.images.gate.parsers.judge import parser_doubts
from pipeline.images.gate.state import gate_state
from pipeline.images.lock.model import current_lock
from pipeline.images.spec.checkout import Checkout
from pipeline.serving.recipe.container import ANYWHERE, LOOPBACK, container_arguments
from pipeline.serving.recipe.launch import (
    MASTER_PORT,
    OWN_ADDRESS,
    Launch,
    NodePlace,
    Overrides,
    node_places,
    on_node,
    plan_launch,
    with_whole_repositories,
)
from pipeline.serving.recipe.model import Recipe
from pipeline.serving.recipe.parser import check_flags
from pipeline.serving.serve import weights as weights_on_disk
from pipeline.serving.serve.attempts import START_S, Attempt, ServeOptions
from pipeline.serving.serve.equal_nodes import NodeFacts, compare_nodes
from pipeline.serving.serve.fits import model_in, plan_fit
from pipeline.serving.serve.host_nccl import HostNccl, with_host_nccl, with_nccl_of
from pipeline.serving.serve.preflight import require_ready, run_checks
from pipeline.serving.serve.run import (
    ServedStatus,
    ServeJob,
    attempts_of,
    find_among,
    new_attempt,
    port_holder,
    preflight,
    recipe_digest,
    status_of,
)
from pipeline.serving.serve.run import serve_launch as serve_job
from pipeline.serving.serve.run import stop_container as stop_container
from pipeline.serving.serve.site import HERE, Site, find_remote_site, platform_of, tunnel_of
from pipeline.serving.serve.start import STOP_S, Served
from pipeline.serving.tune.moe import FOLDER_VARIABLES
from pipeline.serving.tune.table import find_table, unfit, with_table, write_table
from pipeline.weights.model import kept_locks

_LONGEST_CHAIN = 8
# The compiler whose output the driver has to load; the first that an image has.
_CUDA_COMPILERS = ("nvidia-cuda-nvcc", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime")


@dataclass(frozen=True)
class RemoteHost:
    """A host, or several, as the user names them."""

    host: str
    inventories: tuple[str, ...] = ()

    def words(self) -> str:
        """The host as options of a command that a user may type next."""
        return " ".join(["--on", self.host, *(f"-i {shlex.quote(i)}" for i in self.inventories)])

    def each(self) -> list[RemoteHost]:
        """Split the names at commas; the first is rank 0."""
        return [RemoteHost(name, self.inventories) for name in self.host.split(",") if name]


@dataclass(frozen=True)
class ServeRequest:
    """A recipe to serve, and what the user changes of it."""

    recipe: str
    folders: tuple[Path, ...] = ()  # recipes of the user's own
    weights: Path | None = None
    draft: Path | None = None
    overrides: Overrides = field(default_factory=Overrides)
    gpus: tuple[int, ...] = ()
    lan: bool = False
    host_nccl: HostNccl | None = None
    timeout_s: int = int(START_S)
    skipped: tuple[str, ...] = ()
    engine: Wanted = "auto"
    on: RemoteHost | None = None
    hosts: tuple[str, ...] = ()  # addresses of several nodes, as they reach each other

    def options(self) -> ServeOptions:
        """The request as options of the engine's start, with whole paths."""
        return ServeOptions(
            overrides=self.overrides,
            weights=folder_on(self.on, self.weights, "--weights"),
            draft=folder_on(self.on, self.draft, "--draft"),
            cards=self.gpus,
            lan=self.lan,
            host_nccl=self.host_nccl,
            timeout_s=self.timeout_s,
            skipped=self.skipped,
        )


@dataclass(frozen=True)
class ServeContext:
    """What a start of a recipe uses; its fallbacks use the same."""

    checkout: Checkout
    store: Store
    options: ServeOptions
    site: Site = HERE
    dry_run: bool = False  # writes nothing, on this machine or on another host


@dataclass(frozen=True)
class ServedRecipe:
    """A running recipe, and the attempt that started it."""

    recipe: Recipe
    served: Served
    attempt: str


@dataclass(frozen=True)
class StartPlan:
    """Every check of the machines, and the containers that a start would make, one a node."""

    recipe: str
    checks: list[RuleResult]
    commands: list[list[str]]


def serve_recipe(
    workspace: Workspace, request: ServeRequest, *, with_fallback: bool = False
) -> ServedRecipe:
    """Start a recipe's engine in a container, and wait until it answers.

    With `with_fallback`, tries the recipe's fallbacks where it fails. On several hosts the workers
    start first; if one rank fails, none stays.
    """
    if request.on and len(request.on.each()) > 1:
        with ranks_on(workspace, request) as ranks:
            store, (rank_0, engine) = workspace.store(), ranks[0]
            say_contrary(rank_0.recipe)
            require_ready(check_ranks(ranks))
            started: list[tuple[ContainerEngine, str]] = []
            try:
                with store.in_use():
                    for job, containers in ranks[1:]:
                        served = serve_job(containers, store, job, new_attempt(job))
                        log.say(f"{job.site.host}: rank {job.launch.rank} started")
                        started.append((containers, served.container))
                    begun = new_attempt(rank_0)
                    whole = replace(rank_0, workers=tuple(started))
                    return ServedRecipe(
                        rank_0.recipe, serve_job(engine, store, whole, begun), begun.id
                    )
            except BaseException:
                for containers, name in started:
                    # removes one that ended by itself, too
                    if facts := containers.container(name):
                        stop_container(containers, store, facts, 0)
                raise
    options, recipes = request.options(), recipes_of(workspace, request.folders)
    # reports a wrong name even where no Docker runs
    first = recipes.read(request.recipe)
    with machine_on(workspace, request.on, request.engine) as (site, containers):
        context = ServeContext(workspace.checkout(), workspace.store(), options, site)
        recipe, tried, after = first, [first.name], None
        while True:
            say_contrary(recipe)
            with context.store.in_use():
                job = make_job(context, recipe, after)
                warn_of_parsers(context, job)
                begun = new_attempt(job)
                try:
                    served = serve_job(containers, context.store, job, begun)
                    return ServedRecipe(recipe, served, begun.id)
                except (errors.StartFailed, errors.BackendDiffers) as error:
                    if not recipe.fallback:
                        raise
                    if not with_fallback:
                        error.hint += f" The recipe's fallback: `sm120 serve {recipe.fallback}`."
                        raise
                    log.say(f"{error}\nTrying its fallback, {recipe.fallback}")
                    after, fallback = begun.id, recipe.fallback
            if fallback in tried or len(tried) > _LONGEST_CHAIN:
                chain = " → ".join([*tried, fallback])
                raise errors.RecipeInvalid(f"{first.name}: fallback: {chain} has no end")
            tried.append(fallback)
            # one by one, as most starts need none
            recipe = recipes.read(fallback)


def plan_start(workspace: Workspace, request: ServeRequest) -> StartPlan:
    """Check the machine for a recipe, and name the container; starts nothing."""
    options = request.options()
    recipe = recipes_of(workspace, request.folders).read(request.recipe)
    if request.on and len(request.on.each()) > 1:
        with ranks_on(workspace, request, dry_run=True) as ranks:
            commands = [start_command(job, containers) for job, containers in ranks]
            return StartPlan(recipe.name, check_ranks(ranks), commands)
    with machine_on(workspace, request.on, request.engine) as (site, containers):
        store = workspace.store_to_read()
        context = ServeContext(workspace.checkout(), store, options, site, dry_run=True)
        job = make_job(context, recipe)
        warn_of_parsers(context, job)
        rows = preflight(job, port_holder(containers, job.launch.port))
    return StartPlan(job.recipe.name, rows, [start_command(job, containers)])


def start_command(job: ServeJob, containers: ContainerEngine) -> list[str]:
    """Write the command line that starts the container."""
    name = job.recipe.image or ""
    # where the image is not built, a check has failed and says so
    image = default_tag(name, job.record.digest) if job.record else name
    # where no folder is named, a check has failed and says so, with the same word in its fix
    mounts = [m if m.host else m.model_copy(update={"host": "DIR"}) for m in job.launch.mounts]
    launch = job.launch.model_copy(update={"mounts": mounts})
    arguments = container_arguments(launch, image=image, cards=job.cards, address=job.address)
    return [containers.kind, "run", *arguments.run_flags(), image, *arguments.arguments]


@contextmanager
def ranks_on(
    workspace: Workspace, request: ServeRequest, *, dry_run: bool = False
) -> Iterator[list[tuple[ServeJob, ContainerEngine]]]:
    """Yield the starts of all ranks, each on its own host, while the block lasts."""
    hosts = request.on.each() if request.on else []
    recipe = recipes_of(workspace, request.folders).read(request.recipe)
    if recipe.nodes != len(hosts):
        raise errors.RecipeInvalid(
            f"{recipe.name}: is for {log.count(recipe.nodes, 'node')}, and --on names {len(hosts)}",
            f"Copy it with `nodes: {len(hosts)}` and the cards of each, or name other hosts.",
        )
    store = workspace.store_to_read() if dry_run else workspace.store()
    with ExitStack() as stack:
        machines = [
            stack.enter_context(machine_on(workspace, host, request.engine)) for host in hosts
        ]
        addresses = list(request.hosts)
        for tunnel in [tunnel_of(site) for site, _ in machines] if not addresses else []:
            # where this machine reached it, unless the user names another network
            answer = tunnel.read(["sh", "-c", "echo $SSH_CONNECTION"]) if tunnel else None
            words = answer.out.decode(errors="replace").split() if answer else []
            addresses.append(words[2] if len(words) == 4 else "")
        places, jobs = node_places(recipe, addresses), []
        for (site, containers), place in zip(machines, places.values(), strict=True):
            options = request.options()
            context = ServeContext(workspace.checkout(), store, options, site, dry_run)
            jobs.append((make_job(context, recipe, place=place), containers))
        yield jobs


def check_ranks(ranks: Sequence[tuple[ServeJob, ContainerEngine]]) -> list[RuleResult]:
    """Check each node, and what must be equal on all of them."""
    rows, nodes = list[RuleResult](), list[NodeFacts]()
    for job, containers in ranks:
        site, recipe, tunnel = job.site, job.recipe, tunnel_of(job.site)
        machine, meeting = site.look(recipe, job.port), site.port_problem(MASTER_PORT)
        held = replace(job, port_holder=port_holder(containers, job.port))
        for row in run_checks(held, machine, job.skipped):
            rows.append(row.model_copy(update={"subject": f"{site.host}: {row.subject}"}))
        used = recipe.hardware.cards
        gpus = then(machine.facts, lambda facts: facts.gpus)
        names = [] if isinstance(gpus, Unknown) else [gpu.name for gpu in gpus[:used]]
        problems = {job.port: machine.port_problem, MASTER_PORT: meeting}
        driver = then(machine.facts, lambda facts: facts.driver.version)
        weights = job.weights.digest if job.weights else None
        node = NodeFacts(
            host=site.host,
            address=job.launch.environment[OWN_ADDRESS[job.launch.engine]],
            platform=platform_of(tunnel, site.host) if tunnel else host_platform(),
            image=job.record.digest if job.record else unknown("the image is not built"),
            weights=weights or unknown("nothing says which weights these are"),
            driver=driver if used else None,
            cards=(first_unknown(gpus, *names) or list(map(str, names))) if used else None,
            ports=first_unknown(*problems.values()) or {p: str(x) for p, x in problems.items()},
            clock_s=site.clock_s(),
        )
        nodes.append(node)
    # skipping a check skips its comparison, too
    skipped = ranks[0][0].skipped
    return [*(row for row in compare_nodes(nodes) if row.subject not in skipped), *rows]


def served_now(
    workspace: Workspace, engine: Wanted = "auto", on: RemoteHost | None = None
) -> tuple[list[ServedStatus], str]:
    """List what is served, and name the container engines that it asked."""
    store = workspace.store_to_read()
    with machine_of_all(workspace, on, engine) as (site, engines):
        return [row for each in engines for row in status_of(each, store, site)], titles(engines)


def follow_log(
    workspace: Workspace,
    recipe: str,
    *,
    follow: bool = False,
    tail: int | None = None,
    engine: Wanted = "auto",
    on: RemoteHost | None = None,
) -> Iterator[bytes]:
    """The log of a served recipe, piece by piece."""
    with machine_of_all(workspace, on, engine) as (_, engines):
        containers, facts = find_among(engines, recipe)
        yield from containers.output(facts.id, follow=follow, tail=tail)


def stop_recipes(
    workspace: Workspace,
    recipes: tuple[str, ...] = (),
    *,
    timeout_s: int = STOP_S,
    engine: Wanted = "auto",
    on: RemoteHost | None = None,
) -> dict[str, float]:
    """Stop served recipes, or all of this user's; returns the seconds that each took.

    Names what another user of the same Docker serves, and leaves it running.
    """
    store = workspace.store()
    with machine_of_all(workspace, on, engine) as (_, engines):
        all_served = [(each, facts) for each in engines for facts in each.containers()]
        own = [(each, facts) for each, facts in all_served if not other_owner(facts)]
        found = [find_among(engines, name) for name in recipes] if recipes else own
        for _, facts in () if recipes else all_served:
            if owner := other_owner(facts):
                log.say(f"{facts.name}: another user serves it ({owner}), so it keeps running")
        if not found:
            raise errors.NothingServed(f"nothing is served in {titles(engines)}")
        return {
            facts.recipe or facts.name: stop_container(containers, store, facts, timeout_s)
            for containers, facts in found
        }


def attempts(workspace: Workspace, host: str | None = None) -> list[Attempt]:
    """List attempts, oldest first, of one host or of all."""
    known = attempts_of(workspace.store_to_read())
    timeline = known.read()
    if timeline.damaged:
        log.say(f"{known.path}: {log.count(timeline.damaged, 'line')} cannot be read")
    return [each for each in timeline.attempts if host in (None, each.begun.host)]


@contextmanager
def machine_on(
    workspace: Workspace, on: RemoteHost | None, wanted: Wanted, holding: str | None = None
) -> Iterator[tuple[Site, ContainerEngine]]:
    """Yield a machine and its container engine while the block lasts.

    If there are several engines, picks the one with the container of the recipe `holding`.
    """
    if on and len(on.each()) > 1:
        raise errors.HostUnreached(
            f"{on.host}: names several hosts, of which only the first answers clients",
            f"Name that one: --on {on.each()[0].host}.",
        )
    if on is None:
        engines = find_engines(wanted) if holding else [find_engine(wanted)]
        engine = engines[0]
        if holding:
            with suppress(errors.NothingServed):
                engine = find_among(engines, holding)[0]
        yield HERE, engine
        return
    with connected(workspace, on) as tunnel:
        site, engine = find_remote_site(tunnel, on.host, wanted)
        log.say(f"{on.host}: {site.kind} answers")
        yield site, engine


@contextmanager
def machine_of_all(
    workspace: Workspace, on: RemoteHost | None, wanted: Wanted
) -> Iterator[tuple[Site, list[ContainerEngine]]]:
    """Yield a machine with every container engine: either may run what is served."""
    if on is None:
        yield HERE, find_engines(wanted)
        return
    with machine_on(workspace, on, wanted) as (site, engine):
        yield site, [engine]


@contextmanager
def connected(workspace: Workspace, on: RemoteHost) -> Iterator[Tunnel]:
    """Log in on a host while the block lasts."""
    if on.inventories:
        with log.step(f"Asking Ansible how {on.host} is reached"):
            connection = connection_of(workspace.checkout(), on.inventories, on.host)
    else:
        connection = plain_connection(on.host)
    with open_tunnel(connection) as tunnel:
        yield tunnel


def folder_on(on: RemoteHost | None, folder: Path | None, option: str) -> str | None:
    """Return a local folder as a whole path; one of another host as named."""
    if folder is None or on is not None:
        return str(folder) if folder else None
    if not folder.is_dir():
        raise errors.WeightsUnknown(f"{folder}: is not a folder", f"Name one with {option} DIR.")
    return str(folder.resolve())


def make_job(
    context: ServeContext,
    recipe: Recipe,
    after: str | None = None,
    place: NodePlace | None = None,
) -> ServeJob:
    """Make one start of a recipe; over several nodes, the start of the rank at `place`."""
    if recipe.nodes > 1 and place is None:
        raise errors.RecipeInvalid(
            f"{recipe.name}: is for {recipe.nodes} nodes",
            f"`sm120 serve {recipe.name} --on HOST,HOST` starts a rank on each; `sm120 render"
            f" {recipe.name} --as docker --hosts ADDRESS,ADDRESS` prints them.",
        )
    checkout, options, tunnel = context.checkout, context.options, tunnel_of(context.site)
    if recipe.image is None:
        raise errors.RecipeInvalid(
            f"{recipe.name}: is for an engine without a container",
            f"`sm120 render {recipe.name} --as shell` prints its command.",
        )
    overrides = all_overrides(recipe, options.overrides, options.weights)
    path = Path(overrides.model_path or "")
    if tunnel is None and path.is_absolute():
        # the folder by its real name, which shows a snapshot of a Hub cache; of a GGUF file that
        # is the folder above it, as the file itself is a link to a blob
        real = path.parent.resolve() / path.name if path.is_file() else path.resolve()
        overrides = overrides.model_copy(update={"model_path": str(real)})
    weights = _weights(context, recipe, overrides)
    if tunnel and weights and recipe.model.folder:
        # the host has the parts, not this machine
        first = str(weights.folder / weights.file)
        overrides = overrides.model_copy(update={"model_path": first})
    if weights is None and recipe.model.folder and not overrides.model_path:
        raise errors.WeightsUnknown(
            f"{recipe.name}: no weights are named", "Name their --weights DIR."
        )
    platform = platform_of(tunnel, context.site.host) if tunnel else None
    built = _built(context, recipe.image, platform)
    launch = plan_launch(
        recipe,
        overrides,
        weights=str(weights.folder) if weights else "",
        draft=options.draft or "",
        digest=built.digest if built else None,
    )
    launch = with_whole_repositories(launch)
    launch = with_nccl = on_node(launch, place) if place else launch
    if nccl := options.host_nccl:
        with_nccl = with_nccl_of(tunnel, launch, nccl) if tunnel else with_host_nccl(launch, nccl)
    if built:
        with_nccl = _tuned(context, recipe, built, with_nccl)
    gates = fit = None
    if built:
        has_patches = bool(checkout.series(built.plan.spec).patches)
        gates = gate_state(context.store, built.plan.spec, built, has_patches=has_patches)
    if recipe.hardware.cards:
        fit = plan_fit(recipe, overrides, model_in(recipe, weights, checkout))
    return ServeJob(
        recipe=recipe,
        launch=with_nccl,
        port=with_nccl.port,
        record=built.record if built else None,
        image_is_built=built is not None,
        weights=weights,
        timeout_s=options.timeout_s,
        flags=_refused(checkout, launch),
        cuda=cuda_branch(checkout, recipe.image, platform),
        gates=gates,
        cards=options.cards,
        address=ANYWHERE if options.lan else LOOPBACK,
        skipped=options.skipped,
        after=after,
        options=options.model_copy(update={"overrides": overrides}),
        site=context.site,
        fit=fit,
    )


def _tuned(context: ServeContext, recipe: Recipe, built: Built, launch: Launch) -> Launch:
    """Add the table that `sm120 tune` kept to the launch; say why if it is not used."""
    store, site, folder = context.store, context.site, statements_folder(context.store, built)
    # those of an earlier build of the image are in the folder of its digest
    kept = sorted(
        folder.parent.glob(f"*/kernel-table-{recipe.name}{SUFFIX}"),
        key=lambda path: path.stat().st_mtime,
    )
    if not kept or launch.engine not in FOLDER_VARIABLES:
        return launch

    def unused(why: str) -> Launch:
        log.say(f"The table that `sm120 tune` made for {recipe.name} is not used: {why}")
        return launch

    if site.host:
        return unused(f"tables of this machine are not used on {site.host}")
    found = find_table(folder, recipe.name)
    if found is None:
        others = [path.parent.name for path in kept if path.parent != folder]
        return unused(f"made for image sha256:{others[-1]}" if others else "it cannot be read")
    # loads what reads signatures, which a start without a table does not need
    from pipeline.evidence.verify.signature import judge_signatures

    envelope, table = found
    trust = trust_of(Workspace(context.checkout.root, store.root), None)
    signature, keys = judge_signatures(envelope, trust, datetime.now(UTC))
    # as for weights: signatures decide nothing until a key is trusted here
    if trust and trust.keys and not keys:
        return unused(f"{signature.message}; `sm120 tune {recipe.name}` signs it with your key")
    if not envelope.statement.is_about(built.digest):
        return unused("its statement is about another image")
    machine = site.look(recipe, launch.port)
    gpus = then(machine.facts, lambda facts: facts.gpus)
    driver = then(machine.facts, lambda facts: facts.driver.version)
    own = context.options.cards
    chosen = [] if isinstance(gpus, Unknown) else [g for g in gpus if not own or g.index in own]
    if unseen := first_unknown(gpus, driver, *(gpu.name for gpu in chosen)):
        return unused(unseen.unknown)
    started = {"image": built.name, "platform": built.platform}
    started |= {"recipe": recipe.name, "engine": launch.engine}
    if why := unfit(
        table,
        started=started,
        recipe_digest=recipe_digest(recipe),
        gpus=chosen,
        driver=str(driver),
    ):
        return unused(why)
    if (variable := FOLDER_VARIABLES[launch.engine]) in launch.environment:
        return unused(f"the recipe sets {variable} itself")
    place = store.root / "tuned" / sha256_of(envelope.payload).removeprefix("sha256:")[:32]
    if not context.dry_run:
        write_table(table, place, store, built)
    return with_table(launch, place)


def cuda_branch(checkout: Checkout, image: str, platform: str | None) -> str | None:
    """Read from an image's locks which CUDA branch it compiles with at run time."""
    runs_on = pick_platform(checkout.spec(image), platform)
    versions = {
        pin.name: pin.version
        for spec in checkout.chain(image, runs_on)
        for pin in current_lock(checkout, spec, runs_on).wheels
    }
    compiler = next((versions[name] for name in _CUDA_COMPILERS if name in versions), None)
    return ".".join(compiler.split(".")[:2]) if compiler else None


def warn_of_parsers(context: ServeContext, job: ServeJob) -> None:
    """Say where tool calls or thoughts may get lost: their parsers failed, or were not judged."""
    words = [part for word in job.launch.arguments for part in word.split("=", 1)]
    flags = ("tool_call_parser", "reasoning_parser")
    used = {
        flag: words[words.index(name) + 1]
        for flag in flags
        if (name := f"--{flag.replace('_', '-')}") in words[:-1]
    }
    image, record = job.recipe.image, job.record
    if not used or image is None:
        return
    found: list[Evidence] = []
    # results count for this very digest only, whichever platform it is of
    for platform in context.checkout.spec(image).platforms if record else []:
        with suppress(errors.StoreDamaged):  # the gate's own check says so
            gates = read_evidence(context.store, image, platform, record.digest if record else "")
            found += [each for each in (gates.results if gates else []) if each.gate == "parsers"]
    not_judged: dict[str, str] = {}
    with suppress(errors.GateInvalid):  # an image without parsers.yaml
        not_judged = read_parser_gates(context.checkout, image).file.not_judged
    if doubts := parser_doubts(used, found[0] if found else None, not_judged):
        how = f"`sm120 gate run {image} --only parsers` judges them."
        log.say(f"Mind: {job.recipe.name}: {doubts}. {how}")


def _weights(
    context: ServeContext, recipe: Recipe, overrides: Overrides
) -> weights_on_disk.WeightsFolder | None:
    named = context.options.weights
    given = Path(overrides.model_path) if overrides.model_path else None
    tunnel = tunnel_of(context.site)
    if recipe.model.tiny and given is None and not named:
        place = tunnel or context.store
        return weights_on_disk.tiny_weights(place, recipe, dry_run=context.dry_run)
    folder = Path(named) if named else None
    # a Hub name is no folder on this machine
    if folder is None and given is not None and given.is_absolute():
        # of a GGUF model the variable names the file itself
        is_file = given.suffix == ".gguf" if tunnel else given.is_file()
        folder = given.parent if is_file else given
    if folder is None:
        return None
    known = kept_locks(context.checkout)
    if tunnel:
        return weights_on_disk.find_weights_on(tunnel, recipe, str(folder), known)
    return weights_on_disk.find_weights(recipe, folder, known)


def _built(context: ServeContext, image: str, platform: str | None) -> Built | None:
    try:
        return find_image(context.checkout, context.store, image, platform)
    except errors.UnknownImage:
        # if this checkout does not know the image at all, the recipe is wrong
        context.checkout.spec(image)
        return None


def _refused(checkout: Checkout, launch: Launch) -> Known[tuple[str, ...]]:
    """List what the image's engine would refuse, if its parser is known."""
    try:
        parser = find_parser_flags(flags_folder(checkout), launch.engine, launch.image)
    except errors.RecipeInvalid as error:
        return unknown(f"{error}. {error.hint}")
    return tuple(str(problem) for problem in check_flags(launch, parser))
