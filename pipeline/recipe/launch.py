"""From a recipe to the exact command: what every rendering and every start is made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pipeline.errors import RecipeInvalid
from pipeline.model import Digest, Frozen, Name
from pipeline.recipe.flags import Flags, LlamaFlags, SglangFlags, VllmFlags
from pipeline.recipe.model import ContainerSpec, Engine, Port, Recipe, Variable, merged_flags

# Where a container sees the weights and a draft model's weights.
WEIGHTS, DRAFT = "/models", "/draft"
# The field of each engine that a recipe's override takes the place of.
CONTEXT = {VllmFlags: "max_model_len", SglangFlags: "context_length", LlamaFlags: "ctx_size"}
MEMORY = {VllmFlags: "gpu_memory_utilization", SglangFlags: "mem_fraction_static"}


class Overrides(Frozen):
    """What a user changes for one start; the names are those of the documents' scripts."""

    model_path: str | None = None
    served_model_name: str | None = None
    max_model_len: int | None = None
    gpu_memory_utilization: float | None = None
    port: Port | None = None
    enable_eagle3: bool | None = None
    eagle3_model: str | None = None


class Mount(Frozen):
    """A folder of the host that the engine sees."""

    host: str
    inside: str
    read_only: bool = True


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
    cards: int
    container: ContainerSpec
    model: str  # as clients ask for it


PROGRAMS: dict[str, list[str]] = {
    "vllm": ["vllm", "serve"],
    "sglang": ["python3", "-m", "sglang.launch_server"],
    "ik-llama": ["llama-server"],
    "llama-cpp": ["llama-server"],
}


def read_overrides(options: Overrides, environ: Mapping[str, str], names: list[str]) -> Overrides:
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
    """A recipe with a user's overrides, as one exact command."""
    flags = _with_overrides(recipe, merged_flags(recipe), overrides)
    contained = recipe.image is not None
    mounts = [Mount(host=weights, inside=WEIGHTS)] if contained else []
    model = _model_path(recipe, overrides, WEIGHTS if contained else weights)
    name = overrides.served_model_name or recipe.model.name
    port = overrides.port or recipe.port
    speculation: list[str] = []
    if _speculates(recipe, overrides):
        place = DRAFT if contained else draft
        if contained:
            mounts.append(Mount(host=draft, inside=DRAFT))
        speculation = _speculation(recipe, overrides, place)
    return Launch(
        recipe=recipe.name,
        engine=recipe.engine,
        image=recipe.image,
        digest=digest,
        program=PROGRAMS[recipe.engine],
        arguments=[*_head(recipe.engine, model, name, port), *flags.arguments(), *speculation],
        environment=recipe.variables(),
        mounts=mounts,
        port=port,
        cards=recipe.hardware.cards,
        container=recipe.container,
        model=name,
    )


def _with_overrides(recipe: Recipe, flags: Flags, overrides: Overrides) -> Flags:
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
    try:
        return type(flags).model_validate({**flags.model_dump(exclude_none=True), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        raise RecipeInvalid(f"{recipe.name}: {first['loc'][0]}: {first['msg']}") from error


def _model_path(recipe: Recipe, overrides: Overrides, folder: str) -> str:
    if overrides.model_path:
        return overrides.model_path
    return f"{folder}/{recipe.model.file}" if recipe.model.file else folder


def _head(engine: Engine, model: str, name: str, port: int) -> list[str]:
    if engine == "vllm":
        return [model, "--served-model-name", name, "--port", str(port)]
    if engine == "sglang":
        return ["--model-path", model, "--served-model-name", name, "--port", str(port)]
    return ["-m", model, "--alias", name, "--port", str(port)]


def _speculates(recipe: Recipe, overrides: Overrides) -> bool:
    wanted = overrides.enable_eagle3
    if recipe.speculation is None:
        if wanted:
            raise RecipeInvalid(
                f"{recipe.name}: has no speculation to turn on", "Leave ENABLE_EAGLE3 out."
            )
        return False
    return recipe.speculation.enabled if wanted is None else wanted


def _speculation(recipe: Recipe, overrides: Overrides, folder: str) -> list[str]:
    spec = recipe.speculation
    assert spec is not None
    model = overrides.eagle3_model or folder
    if recipe.engine == "vllm":
        body = {"method": spec.method, "model": model, "num_speculative_tokens": spec.tokens}
        return ["--speculative-config", json.dumps(body, separators=(",", ":"))]
    if recipe.engine == "sglang":
        return [
            *("--speculative-algorithm", spec.method.upper()),
            *("--speculative-draft-model-path", model),
            *("--speculative-num-steps", str(spec.tokens)),
        ]
    raise RecipeInvalid(f"{recipe.name}: {recipe.engine} is given no draft model here")
