"""Turns a recipe into the exact command, from which every rendering and every start follows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from pipeline.artifacts.containers.arguments import Mount
from pipeline.core.errors import RecipeInvalid
from pipeline.core.model import HUB_REPOSITORY, Digest, Engine, Frozen, Name, Port, Variable, Word
from pipeline.serving.recipe.flags import (
    Flags,
    Fraction,
    LlamaFlags,
    Positive,
    SglangFlags,
    Text,
    VllmFlags,
)
from pipeline.serving.recipe.model import (
    ContainerSpec,
    LlamaRecipe,
    Recipe,
    Speculation,
    merged_flags,
)

# Where a container sees the weights and a draft model's weights.
WEIGHTS, DRAFT = "/models", "/draft"
# The field of each engine that a recipe's override takes the place of.
CONTEXT = {VllmFlags: "max_model_len", SglangFlags: "context_length", LlamaFlags: "ctx_size"}
MEMORY = {VllmFlags: "gpu_memory_utilization", SglangFlags: "mem_fraction_static"}
# Where the ranks of an engine meet, by vLLM's default; it asks nobody for a password.
MASTER_PORT = 29501
# The variable by which each engine is told its own address.
OWN_ADDRESS = {"vllm": "VLLM_HOST_IP", "sglang": "SGLANG_HOST_IP"}
# A repository's folder has its name from the Hub's client, or the commit tells what it is.
_SNAPSHOT = re.compile(
    r"(?P<repository>.*/models--[^/]+(?=/snapshots/[^/])|.+(?=/snapshots/[0-9a-f]{40}(?:/|$)))"
    r"(?P<below>/snapshots/[^/]+(?:/[^/]+)*)/?"
)


class Overrides(Frozen):
    """What a user changes for one start; the names are those of the documents' scripts."""

    model_path: Text | None = None
    served_model_name: Word | None = None
    max_model_len: Positive | None = None
    gpu_memory_utilization: Fraction | None = None
    port: Port | None = None
    enable_eagle3: bool | None = None
    eagle3_model: Text | None = None


class Launch(Frozen):
    """Everything about one start of an engine, with nothing left to look up."""

    recipe: Name
    engine: Engine
    image: Name | None
    digest: Digest | None = None  # of the image
    program: list[str]  # the engine's own command, where there is no container
    arguments: list[str]  # what follows the image's entrypoint, or the program
    environment: dict[Variable, str]
    mounts: list[Mount]
    port: Port
    cards: int  # of each node
    nodes: int = Field(default=1, exclude_if=lambda n: n == 1)
    rank: int = Field(default=0, exclude_if=lambda n: n == 0)
    container: ContainerSpec
    model: str  # as clients ask for it


PROGRAMS: dict[str, list[str]] = {
    "vllm": ["vllm", "serve"],
    "sglang": ["python3", "-m", "sglang.launch_server"],
    "ik-llama": ["llama-server"],
    "llama-cpp": ["llama-server"],
}


def read_overrides(
    options: Overrides, environ: Mapping[str, str], names: Sequence[str]
) -> Overrides:
    """Options first, then those variables that the recipe listens to."""
    wanted = {name.lower(): environ[name] for name in names if environ.get(name)}
    given = {k: v for k, v in options.model_dump().items() if v is not None}
    try:
        return Overrides.model_validate({**wanted, **given})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]).upper()
        raise RecipeInvalid(
            f"{name}: {first['msg']}", f"Unset {name}, or give it a value as in the docs."
        ) from error


def plan_launch(
    recipe: Recipe,
    overrides: Overrides,
    *,
    weights: str,
    draft: str = "",
    digest: str | None = None,
) -> Launch:
    """Turns a recipe and a user's overrides into one exact command."""
    flags = launch_flags(recipe, overrides)
    if overrides.model_path:
        model, mounts = _given_path(recipe, "MODEL_PATH", overrides.model_path, WEIGHTS)
    else:
        file = (recipe.model.file or "") if isinstance(recipe, LlamaRecipe) else ""
        if isinstance(recipe, LlamaRecipe) and not file:
            # the engine gets the first part of a split model
            folder = Path(weights, str(recipe.model.folder))
            parts = sorted(folder.glob("*-00001-of-*.gguf"))
            if len(parts) != 1:
                raise RecipeInvalid(
                    f"{recipe.name}: {len(parts)} files of {folder} are a first part",
                    "Fetch the weights, or lock them where `render` runs (`sm120 weights lock"
                    f" {recipe.model.weights or 'NAME'}`), or name the first part with MODEL_PATH.",
                )
            file = str(parts[0].relative_to(weights))
        model, mounts = _mounted(recipe, weights, WEIGHTS, file)
    speculation: list[str] = []
    if (spec := speculates(recipe, overrides)) is not None:
        place, more = "", list[Mount]()
        if overrides.eagle3_model or (spec.repository and not draft):
            # with no folder, as the documents have it: the engine asks the Hub itself
            given = overrides.eagle3_model or spec.repository or ""
            place, more = _given_path(recipe, "EAGLE3_MODEL", given, DRAFT)
        elif spec.repository:
            place, more = _mounted(recipe, draft, DRAFT)
        mounts += more
        speculation = _speculation(recipe, spec, place)
    name = overrides.served_model_name or recipe.model.name
    port = overrides.port or recipe.port
    alias = "--served-model-name" if recipe.engine in ("vllm", "sglang") else "--alias"
    head = [*model_words(recipe.engine, model), alias, name]
    head += ["--host", recipe.host] if recipe.host is not None else []
    return Launch(
        recipe=recipe.name,
        engine=recipe.engine,
        image=recipe.image,
        digest=digest,
        program=PROGRAMS[recipe.engine],
        arguments=[*head, "--port", str(port), *flags.arguments(), *speculation],
        environment=recipe.variables(),
        mounts=mounts,
        port=port,
        cards=recipe.hardware.cards,
        nodes=recipe.nodes,
        container=recipe.container,
        model=name,
    )


class NodePlace(NamedTuple):
    """One of the machines that share a model, and where all of them meet."""

    rank: int
    first: str  # the address of rank 0, as the others reach it
    own: str  # of this machine
    port: int = MASTER_PORT


def on_node(launch: Launch, place: NodePlace) -> Launch:
    """A launch over several nodes, as one of them starts it: the whole command of its rank.

    vLLM 0.32.0: engine/arg_utils.py and entrypoints/cli/serve.py; SGLang 0.5.8 and 0.5.23:
    server_args.py.
    """
    words = [*launch.arguments, "--nnodes", str(launch.nodes), "--node-rank", str(place.rank)]
    host = f"[{place.first}]" if ":" in place.first else place.first
    if launch.engine == "sglang":
        words += ["--dist-init-addr", f"{host}:{place.port}"]
    else:
        words += ["--master-addr", place.first, "--master-port", str(place.port)]
        if place.rank:
            # only rank 0 answers clients; vLLM refuses a number of API servers beside --headless
            for flag in (flag for flag in ("--api-server-count", "-asc") if flag in words):
                del words[words.index(flag) : words.index(flag) + 2]
            words = [word for word in words if not word.startswith("--api-server-count=")]
            words.append("--headless")
    # on a machine with several networks engines would tell others the address of any
    environment = {**launch.environment, OWN_ADDRESS[launch.engine]: place.own}
    update = {"arguments": words, "rank": place.rank, "environment": environment}
    return launch.model_copy(update=update)


def node_places(recipe: Recipe, hosts: Sequence[str]) -> dict[int, NodePlace]:
    """Each rank of a recipe with its address; none for a recipe on one machine."""
    if recipe.nodes == 1 and len(hosts) < 2:
        return {}
    try:
        # engines hand their addresses on to others, and cannot do so with names
        addresses = [str(ip_address(host)) for host in hosts]
    except ValueError as error:
        raise RecipeInvalid(
            f"{recipe.name}: {error}", "`ip -brief address` on each node shows its addresses."
        ) from None
    if len({*addresses}) != recipe.nodes or len(addresses) != recipe.nodes:
        raise RecipeInvalid(
            f"{recipe.name}: is for {recipe.nodes} nodes, and {len({*addresses})} are named",
            "Name their addresses in the order of their ranks, such as"
            " --hosts 10.0.0.1,10.0.0.2; the first one answers clients.",
        )
    return {rank: NodePlace(rank, addresses[0], own) for rank, own in enumerate(addresses)}


def over_nodes(recipe: Recipe, nodes: int) -> Recipe:
    """Spreads all the cards of a recipe over another number of equal machines."""
    cards = recipe.nodes * recipe.hardware.cards
    if nodes == recipe.nodes:
        return recipe
    if cards % nodes or (nodes > 1 and isinstance(recipe, LlamaRecipe)):
        why = f"its {cards} cards are not on {nodes} equal nodes"
        if isinstance(recipe, LlamaRecipe):
            why = f"{recipe.engine} has no ranks, and runs on one machine"
        raise RecipeInvalid(f"{recipe.name}: {why}", "Name another number with --nodes.")
    hardware = recipe.hardware.model_copy(update={"cards": cards // nodes})
    return recipe.model_copy(update={"nodes": nodes, "hardware": hardware})


def launch_flags(recipe: Recipe, overrides: Overrides) -> Flags:
    """The flags of a start, with what the user changes."""
    flags = merged_flags(recipe)
    changes: dict[str, Any] = {}
    for value, fields, name in (
        (overrides.max_model_len, CONTEXT, "MAX_MODEL_LEN"),
        (overrides.gpu_memory_utilization, MEMORY, "GPU_MEMORY_UTILIZATION"),
    ):
        if value is None:
            continue
        if (field := fields.get(type(flags))) is None:
            raise RecipeInvalid(
                f"{recipe.name}: {name} means nothing to {recipe.engine}", f"Leave {name} out."
            )
        changes[field] = value
    # the values are checked: an override has the type of the field whose place it takes
    return flags.model_copy(update=changes)


def context_of(recipe: Recipe) -> int | None:
    """The context with which a recipe starts its engine; none where the engine's own counts."""
    flags = merged_flags(recipe)
    field = CONTEXT.get(type(flags))
    return getattr(flags, field) if field else None


def _mounted(recipe: Recipe, host: str, inside: str, file: str = "") -> tuple[str, list[Mount]]:
    """A folder of the host, or a file in it, as the engine sees it."""
    if recipe.image is None:
        return str(PurePosixPath(host, file)), []
    return str(PurePosixPath(inside, file)), [Mount(host=host, inside=inside)]


def _given_path(recipe: Recipe, name: str, path: str, inside: str) -> tuple[str, list[Mount]]:
    """A name of the Hub as it is; a folder or file of the host as a container sees it."""
    is_file = isinstance(recipe, LlamaRecipe)
    if not is_file and re.fullmatch(HUB_REPOSITORY, path):
        return path, []
    if not path.startswith("/"):
        want = "the whole path of a GGUF file" if is_file else "organisation/model or a whole path"
        raise RecipeInvalid(f"{name}: is {path!r}", f"Give {name} {want}.")
    if recipe.image is None:
        return path, []
    if not is_file:
        return _mounted(recipe, path, inside)
    # the whole folder: the other parts of a split model are next to the first
    return _mounted(recipe, str(PurePosixPath(path).parent), inside, PurePosixPath(path).name)


def model_words(engine: str, model: str) -> list[str]:
    """The words that name the model to an engine's server."""
    flag = {"vllm": [], "sglang": ["--model-path"]}.get(engine, ["-m"])
    return [*flag, model]


def speculates(recipe: Recipe, overrides: Overrides) -> Speculation | None:
    """The draft model of a start; none where it is turned off."""
    spec, wanted = recipe.speculation, overrides.enable_eagle3
    if spec is None:
        given = {"ENABLE_EAGLE3": wanted, "EAGLE3_MODEL": overrides.eagle3_model}
        if named := [name for name, value in given.items() if value]:
            message = f"{recipe.name}: has no speculation to turn on"
            raise RecipeInvalid(message, f"Leave {named[0]} out.")
        return None
    return spec if (spec.enabled if wanted is None else wanted) else None


def _speculation(recipe: Recipe, spec: Speculation, model: str) -> list[str]:
    """The flags of a draft model."""
    if recipe.engine == "vllm":
        named = {"model": model} if model else {}
        length = {"num_speculative_tokens": spec.tokens}
        body = {"method": spec.method, **named, **length, **spec.settings}
        return ["--speculative-config", json.dumps(body, separators=(",", ":"))]
    if recipe.engine != "sglang":
        raise RecipeInvalid(
            f"{recipe.name}: {recipe.engine} is given no draft model here",
            "Leave `speculation` out of the recipe, or name SGLang or vLLM as its engine.",
        )
    named = {"draft_model_path": model} if model else {}
    # All three or none: with the number of steps alone, SGLang compares None with a number.
    # One branch a step makes the drafts a chain, as vLLM's are.
    length = {"num_steps": spec.tokens, "eagle_topk": 1, "num_draft_tokens": spec.tokens + 1}
    if spec.method.lower() == "dspark":  # proposes a block at once
        length = {"dspark_block_size": spec.tokens}
    body = {"algorithm": spec.method.upper(), **named, **length, **spec.settings}
    flags = {f"--speculative-{key.replace('_', '-')}": str(v) for key, v in body.items()}
    return [word for pair in flags.items() for word in pair]


def with_whole_repositories(launch: Launch) -> Launch:
    """The same launch, mounting a whole repository instead of a snapshot of it.

    In a cache of the Hub's client, the files of a snapshot are links to ../../blobs, which the
    container must see too.
    """
    mounts, arguments = [], launch.arguments
    for mount in launch.mounts:
        if found := _SNAPSHOT.fullmatch(mount.host):
            # a path inside the mount, also as a value in JSON, by its new name
            path = rf"(?<![\w./-]){re.escape(mount.inside)}(?![\w.-])"
            inside = (mount.inside + found["below"]).replace("\\", r"\\")
            arguments = [re.sub(path, inside, word) for word in arguments]
            mount = mount.model_copy(update={"host": found["repository"]})
        mounts.append(mount)
    return launch.model_copy(update={"mounts": mounts, "arguments": arguments})
