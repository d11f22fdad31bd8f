"""Tune the kernel of a recipe's experts on this machine's card, and keep the result.

What only a card can tell is an artefact of its own: a statement about the image, for one recipe,
card and driver. `publish` brings it along, and `serve` uses it where all of them are the same.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import __version__
from pipeline.app.gate import make_gate_context, open_image_gate
from pipeline.app.images import find_image
from pipeline.app.recipes import recipes_of
from pipeline.app.signing import Signing
from pipeline.app.workspace import Workspace
from pipeline.artifacts.attest import names
from pipeline.artifacts.attest.predicates import KernelTable
from pipeline.artifacts.attest.statement import make_statement, moment
from pipeline.artifacts.attest.strict import as_model
from pipeline.artifacts.containers.container_engine import Wanted, find_engine
from pipeline.artifacts.containers.docker import default_tag
from pipeline.core import log, proc
from pipeline.core.errors import GateUnknown, RecipeInvalid, StepFailed, WeightsUnknown
from pipeline.core.files import os_errors_explained
from pipeline.core.known import Known, Unknown, unknown
from pipeline.core.model import canonical_json, sha256_of
from pipeline.evidence.statements.evidence_set import statements_folder
from pipeline.evidence.statements.image import keep_all
from pipeline.hosts.probes.runner import card_options
from pipeline.images.assemble.image import Built
from pipeline.images.assemble.plan import GATE_WORKER, program_digest
from pipeline.images.gate.smem.cases import KernelCase, Override
from pipeline.images.gate.smem.image_gate import ImageGate, find_case
from pipeline.images.gate.smem.limits import Card, card_for
from pipeline.images.gate.smem.run import answered
from pipeline.serving.fit.facts import fact_of
from pipeline.serving.recipe.model import Recipe, merged_flags
from pipeline.serving.serve.fits import find_served_model
from pipeline.serving.serve.run import recipe_digest
from pipeline.serving.tune.moe import FOLDER_VARIABLES, KERNEL, MoeShape, case_for, find_shape
from pipeline.serving.tune.search import Judge, TunedTokens, tune_tokens
from pipeline.serving.tune.table import find_table
from pipeline.serving.tune.trials import WORKER, Config, Journal, TrialWorker

# Engines take the nearest size of a table, so every table has these.
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class TuneRequest:
    """Which recipe to tune, on which card of this machine."""

    recipe: str
    folders: tuple[Path, ...] = ()  # recipes of the user's own
    weights: Path | None = None  # a folder with the model's config.json
    tokens: tuple[int, ...] = TOKENS  # other sizes keep what is known of them
    most: int = 60  # trials for each number of tokens
    gpu: int = 0
    engine: Wanted = "auto"
    dry_run: bool = False


@dataclass(frozen=True)
class TunedRecipe:
    """What the recipe reads, and the result for it."""

    recipe: str
    shape: Known[MoeShape]
    rows: tuple[TunedTokens, ...] = ()
    table: KernelTable | None = None  # none: nothing is faster, or nothing was tried
    signed: str = ""
    earlier: KernelTable | None = None  # where nothing is faster: the one that stays


def tune_recipe(workspace: Workspace, request: TuneRequest, signing: Signing) -> TunedRecipe:
    """Times configurations of the experts' kernel on a card, and keeps a table of faster ones."""
    recipe = recipes_of(workspace, request.folders).read(request.recipe)
    checkout = workspace.checkout()
    if recipe.engine not in FOLDER_VARIABLES:
        return TunedRecipe(recipe.name, unknown(f"{recipe.engine} has no such table"))
    model = find_served_model(recipe, request.weights, checkout)
    if isinstance(model, Unknown) and (known := fact_of(recipe.model.repository or "")):
        model = known.architecture()
    if isinstance(model, Unknown):
        raise WeightsUnknown(
            f"{recipe.name}: {model.unknown}",
            "Name the model's folder or its config.json with --weights PATH.",
        )
    shape = find_shape(recipe, model)
    if isinstance(shape, Unknown) or request.dry_run:
        return TunedRecipe(recipe.name, shape)
    if recipe.image is None:
        raise RecipeInvalid(f"{recipe.name}: is for an engine without a container")
    given = merged_flags(recipe).given()
    if (given.get("moe_backend") or given.get("moe_runner_backend")) != "triton":
        log.say(
            "The recipe leaves the experts' backend to the engine, which reads a table only where"
            " it takes Triton's: its log has `Using … MoE backend`"
        )
    store, context = workspace.store(), make_gate_context(workspace)
    built = find_image(checkout, store, recipe.image, None)
    containers = find_engine(request.engine)
    with store.in_use(), store.locked(f"tune-{request.gpu}"):
        gate = open_image_gate(context, recipe.image, built.platform)
        case = case_for(gate.gates.cases(), shape)
        if case is None:
            raise GateUnknown(
                f"{recipe.image}: no case of its gate calls {KERNEL} with such weights"
            )
        judged = find_case(gate.gates, case["name"])
        containers.load(store, recipe.image, built.digest)
        job = {
            **gate.target(gate.patched(), card_for("sm_120")).job([judged]),
            **{"engine": f"/{built.plan.venv.site}", "gate_worker": "/gate", "case": case},
            **{"shape": shape.model_dump(), "gpu": request.gpu},
        }
        job.pop("cases")
        with tempfile.TemporaryDirectory(prefix="sm120-tune-") as name:
            Path(name, "job.json").write_text(json.dumps(job), encoding="utf-8")
            # the image's user is not ours
            Path(name).chmod(0o755)
            Path(name, "job.json").chmod(0o644)
            env = proc.child_environment("DOCKER_HOST")
            # of this store and card, whose lock we hold: nobody else's has the name
            place = sha256_of(bytes(store.root)).removeprefix("sha256:")[:8]
            container = f"sm120-tune-{place}-{request.gpu}"
            asked = [containers.kind, "version", "--format", "{{.Server.Version}}"]
            version = proc.read(asked, env=env).stdout.decode(errors="replace")
            # nothing is pulled, no network; the worker and its job are read-only
            command = [
                *(containers.kind, "run", "--rm", "--interactive", "--name", container),
                *("--pull=never", "--network=none", "--ipc=host", "--ulimit", "memlock=-1"),
                *card_options(containers.kind, version),
                # as nvidia-smi counts, which reports on it
                *("--env", "CUDA_DEVICE_ORDER=PCI_BUS_ID"),
                *("--env", f"CUDA_VISIBLE_DEVICES={request.gpu}"),
                *("--env", "TRITON_CACHE_DIR=/tmp/triton"),
                *("--volume", f"{WORKER}:/tune:ro", "--volume", f"{GATE_WORKER}:/gate:ro"),
                *("--volume", f"{name}:/job:ro", "--entrypoint", "python3"),
                *(default_tag(recipe.image, built.digest), "/tune", "/job/job.json"),
            ]
            log_path = store.root / "tmp" / f"tune-{request.gpu}.log"
            with os_errors_explained(log_path), log_path.open("wb") as errors:
                # ending `docker run` does not end its container
                remove = [containers.kind, "rm", "--force", container]
                worker = TrialWorker(command, env, errors, remove)
                try:
                    return _tuned(request, recipe, built, gate, judged, shape, job, worker, signing)
                finally:
                    worker.stop()


def _tuned(
    request: TuneRequest,
    recipe: Recipe,
    built: Built,
    gate: ImageGate,
    judged: KernelCase,
    shape: MoeShape,
    job: dict[str, Any],
    worker: TrialWorker,
    signing: Signing,
) -> TunedRecipe:
    store = gate.context.store
    about = worker.ask({})
    if "file" not in about:
        raise StepFailed(
            f"{recipe.image}: its worker cannot use card {request.gpu}: {about.get('failed')}",
            "`sm120 host check` looks at the driver and the cards; `nvidia-smi` lists them.",
        )
    # a card that has no such number says [N/A]
    smi = {k: v for k, v in about.get("card", {}).items() if v and not v.startswith("[")}
    named = ("name", "driver_version", "compute_cap")
    if missing := [name for name in named if name not in smi]:
        raise StepFailed(
            f"{recipe.image}: nvidia-smi in its container lacks {', '.join(missing)} of card"
            f" {request.gpu}, and times without them are of no use",
            "`nvidia-smi` must work in containers: `nvidia-ctk cdi generate` makes what the NVIDIA"
            " Container Toolkit gives them; `sm120 host check` looks at it.",
        )
    worker.card, digest = smi, recipe_digest(recipe)
    programs = [program_digest(WORKER), program_digest(GATE_WORKER)]
    decided: list[Any] = [built.digest, digest, *programs]
    # what is called, and what is put in its place
    decided += [job[name] for name in ("case", "shape", "absent", "bare")]
    decided += [smi.get(name) for name in (*named, "power.limit", "clocks.max.sm")]
    key = sha256_of(canonical_json(decided)).removeprefix("sha256:")
    journal = Journal(store.root / "tuned" / f"{key[:32]}.jsonl")
    with os_errors_explained(journal.path):
        journal.path.parent.mkdir(parents=True, exist_ok=True)
    if known := journal.read():
        log.say(f"{log.count(known, 'trial')} of an earlier run are kept")
    capability = smi["compute_cap"]
    judge = gate_judge(gate, card_for(f"sm_{capability.replace('.', '')}"), judged)
    rows, seeds = list[TunedTokens](), list[Config]()
    sizes = sorted({*TOKENS, *request.tokens})
    with log.counting(len(sizes), "size") as bar:
        for tokens in sizes:
            most = request.most if tokens in request.tokens else 0
            row = tune_tokens(worker, journal, tokens, judge=judge, seeds=seeds, most=most)
            rows.append(row)
            seeds = [row.config] if row.is_faster else seeds
            bar.advance(1)
    if not any(row.is_faster for row in rows):
        kept = find_table(statements_folder(store, built), recipe.name)
        return TunedRecipe(recipe.name, shape, tuple(rows), earlier=kept[1] if kept else None)
    found = {
        "image": built.name,
        "platform": built.platform,
        "recipe": recipe.name,
        "recipe_digest": digest,
        "engine": recipe.engine,
        "kernel": KERNEL,
        "file": about["file"],
        "element_bytes": 1 if shape.dtype else 2,
        "card": {
            "name": smi["name"],
            "compute_capability": capability,
            "driver": smi["driver_version"],
            "power_limit_w": smi.get("power.limit"),
            "clock_mhz": smi.get("clocks.sm"),
            "most_clock_mhz": smi.get("clocks.max.sm"),
        },
        "torch": about["torch"],
        "triton": about["triton"],
        "sizes": [
            {
                **row.model_dump(exclude={"ratio"}),
                "ratio": [row.ratio.low, row.ratio.high] if row.ratio else None,
            }
            for row in rows
        ],
        "tool": {"name": "sm120-pipeline", "version": __version__},
    }
    # much of it is the engine's word
    table, now = as_model(KernelTable, found, f"the table for {recipe.name}"), moment()
    body = table.model_dump(mode="json")
    statement = make_statement(built.name, built.digest, names.KERNEL_TABLE, body, now)
    keep_all(store, built, {f"kernel-table-{recipe.name}": statement}, signing.signers, now)
    keys = [signer.key_id for signer in signing.signers]
    return TunedRecipe(recipe.name, shape, tuple(rows), table, signing.state(keys))


def gate_judge(gate: ImageGate, card: Card, case: KernelCase) -> Judge:
    """Accepts configurations that the shared-memory gate passes; kept answers cost nothing."""
    target = gate.target(gate.patched(), card)

    def judge(configs: Sequence[Config]) -> list[Config]:
        # grouping decides the order of blocks, not what one of them needs
        sizes = [{k: v for k, v in each.items() if k != "GROUP_SIZE_M"} for each in configs]
        variants = {
            canonical_json(values): case.model_copy(
                update={
                    "name": f"{case.name}@{'-'.join(map(str, values.values()))}",
                    "override": Override(kernel=KERNEL, values=values),
                }
            )
            for values in sizes
        }
        fits = set()
        for (values, _), (_, answer, _) in zip(
            variants.items(), answered(target, [*variants.values()]), strict=True
        ):
            needs = [r.shared_bytes for r in answer.records if r.kernel == KERNEL]
            if needs and all(n is not None and n <= card.shared_bytes for n in needs):
                fits.add(values)
        return [c for c, v in zip(configs, sizes, strict=True) if canonical_json(v) in fits]

    return judge
