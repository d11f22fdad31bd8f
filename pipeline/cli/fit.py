"""`sm120 weights fit`: does a model fit, with how much context, and where do its experts go?"""

from __future__ import annotations

import math
from typing import Any

import click
from click.core import ParameterSource

from pipeline import app
from pipeline.cli.options import CARD_SIZE, SIZE, TOKENS, json_option, many_option
from pipeline.cli.output import say_json
from pipeline.core import log
from pipeline.core.errors import DoesNotFit, ModelUnreadable
from pipeline.serving.fit import placement
from pipeline.serving.fit.answer import answer, hybrid_hint, parallel_hint
from pipeline.serving.fit.engine import FitQuestion, shown_bytes
from pipeline.serving.fit.gguf import GgufModel
from pipeline.serving.fit.shape import Architecture
from pipeline.serving.fit.source import ModelSource
from pipeline.serving.fit.units import GIB, gib


def _finite(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    if value is not None and not math.isfinite(value):  # click's ranges let nan through
        raise click.BadParameter(f"{value} is not a number.", context, parameter)
    return value


# people write vLLM and SGLang as the projects do
_ENGINE = click.Choice(["sglang", "vllm", "ik_llama"], case_sensitive=False)


_COUNT = click.IntRange(1, 1024)


_RATE = click.FloatRange(0.001)


# open at both ends: an engine needs some of a GPU, and CUDA's own context some of the rest
_SHARE = click.FloatRange(0, 1, min_open=True, max_open=True)


@click.command("fit")
@click.argument("model", metavar="NAME|ORG/MODEL[@REVISION]|DIR|FILE")
@click.option("--gpu-count", "gpus", type=_COUNT, default=8, help="Number of GPUs of each node.")
@click.option(
    "--nodes",
    type=click.IntRange(1, 64),
    default=1,
    help="Machines that share the model (sglang, vLLM).",
)
@click.option(
    "--vram",
    type=CARD_SIZE,
    # RTX PRO 6000 Blackwell, of which SM120 servers usually have eight
    default="96GB",
    help="Memory per GPU, as it is sold.",
)
@click.option(
    "--ram", type=SIZE, help="Memory of the host, for experts that stay there (ik_llama)."
)
@click.option("--ctx", type=TOKENS, default="64k", help="Tokens per request, like 128k.")
@click.option(
    "--kv", type=click.Choice(["bf16", "fp8"]), help="Type of the KV cache [default: the model's]."
)
@click.option(
    "--tp",
    type=_COUNT,
    help="GPUs that share the model, of all nodes (sglang, vLLM) [default: all].",
)
@click.option("--dcp", type=_COUNT, help="GPUs that share the tokens of a request (vLLM).")
@click.option(
    "--engine",
    type=_ENGINE,
    help="Engine [default: the recipe's, else sglang; ik_llama for GGUF files].",
)
@click.option(
    "--mem-fraction", type=_SHARE, callback=_finite, help="Value of --mem-fraction-static (sglang)."
)
@click.option(
    "--gpu-util", type=_SHARE, callback=_finite, help="Value of --gpu-memory-utilization (vLLM)."
)
@click.option(
    "--prefill",
    type=TOKENS,
    help="Tokens per prefill step (sglang, vLLM) [default: the engine's for such a GPU].",
)
@click.option("--max-seqs", type=_COUNT, help="Value of --max-num-seqs (vLLM).")
@click.option(
    "--weights-per-gpu",
    type=SIZE,
    help="Measured weights per GPU, from the engine's log (sglang, vLLM).",
)
@click.option(
    # both defaults are those of llama.cpp: github.com/ggml-org/llama.cpp
    "--batch",
    type=TOKENS,
    default=2048,
    help="Batch size, -b (ik_llama).",
)
@click.option("--ubatch", type=TOKENS, default=512, help="Micro-batch size, -ub (ik_llama).")
@click.option(
    "--mla",
    type=click.Choice(["0", "1", "2", "3"]),
    default="3",
    help="What an MLA model keeps of a token, -mla (ik_llama): 0 keys and values, else the latent.",
)
@click.option(
    "--headroom", type=SIZE, default="2GiB", help="Memory to leave free per GPU (ik_llama)."
)
@many_option("--check-ot", help="Judge this -ot rule (ik_llama). Repeatable, in order.")
@click.option("--mbps", type=_RATE, callback=_finite, help="Download speed, in MB per second.")
@json_option
@click.pass_context
def weights_fit_command(
    context: click.Context, /, model: str, as_json: bool, **options: Any
) -> None:
    """Calculate what a model needs on each GPU, on the host and on the disk. No GPU is needed.

    Of ORG/MODEL only the config is read, from the Hub (or HF_ENDPOINT). The weights need not be
    here.

    sglang and vLLM divide the model among the GPUs (tensor parallelism). ik_llama runs GGUF files
    on GPUs and host together; for it, a placement of the experts is calculated, as -ot lines.
    """
    source = app.fit.find_any_model(context.obj, model)
    # from here on those of all nodes: what a card holds depends on how many share the model
    options["gpus"] *= options["nodes"]
    # where the user chose no settings, those of a recipe count
    chosen = {"engine", "kv", *_ONLY} - {"nodes"}
    if all(_is_default(context, name) for name in chosen):
        sizes = {name: options[name] for name in ("gpus", "nodes", "vram", "ctx")}
        served = app.fit.as_served(context.obj, source, model, **sizes)
    else:
        served = None
    if served is not None:
        recipe, question = served
        if not as_json:
            _print(f"With the settings of the recipe {recipe}; --engine asks for others.")
        return _parallel(source, question, options | {"recipe": recipe}, as_json)
    is_gguf = isinstance(source.model, GgufModel)
    engine: str = options["engine"] or ("ik_llama" if is_gguf else "sglang")
    # each engine is calculated by its own rules; those of another would give a wrong answer
    if is_gguf != (engine == "ik_llama"):
        raise ModelUnreadable(
            f"{engine} is judged here with {'safetensors' if is_gguf else 'GGUF files'} only",
            "sglang and vLLM take a checkpoint with its config.json; ik_llama takes GGUF files.",
        )
    for name, engines in _ONLY.items():
        if not _is_default(context, name) and engine not in engines:
            flag = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{flag} is for {' and '.join(engines)}; this is {engine}.")
    if engine == "ik_llama":
        assert isinstance(source.model, GgufModel)
        return _hybrid(source, source.model, options, as_json)
    tp, dcp = options["tp"] or options["gpus"], options["dcp"] or 1
    # refused here in the terms of the options, rather than as a model that does not fit
    if tp > options["gpus"]:
        raise click.UsageError(f"--tp {tp}: there are only {options['gpus']} cards.")
    if tp % options["nodes"]:
        raise click.UsageError(f"--tp {tp}: {options['nodes']} nodes cannot share it evenly.")
    if tp % dcp:
        raise click.UsageError(f"--dcp {dcp}: it must divide the {tp} cards of a model.")
    asked = {
        "card_bytes": shown_bytes(options["vram"]),
        "tp": tp,
        "dcp": dcp,
        "context": options["ctx"],
        "engine": engine,
        "kv": options["kv"],
        "fraction": options["mem_fraction"] or options["gpu_util"],
        "prefill_given": options["prefill"],
        "sequences_given": options["max_seqs"],
        "measured_bytes": options["weights_per_gpu"],
    }
    _parallel(source, FitQuestion.model_validate(asked), options, as_json)


def _is_default(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.DEFAULT


# Every other option is for all engines. One that has no effect would leave a user believing in it.
_PARALLEL = ("sglang", "vllm")


_BETWEEN_NODES = (
    "Between nodes NCCL has buffers of its own, for each network adapter; no measurement of them"
    " was found, and they are not in this sum."
)
_ONLY: dict[str, tuple[str, ...]] = {
    "mem_fraction": ("sglang",),
    "gpu_util": ("vllm",),
    "dcp": ("vllm",),
    "max_seqs": ("vllm",),
    "nodes": _PARALLEL,
    "tp": _PARALLEL,
    "prefill": _PARALLEL,
    "weights_per_gpu": _PARALLEL,
    "ram": ("ik_llama",),
    "batch": ("ik_llama",),
    "ubatch": ("ik_llama",),
    "mla": ("ik_llama",),
    "headroom": ("ik_llama",),
    "check_ot": ("ik_llama",),
}


def _parallel(
    source: ModelSource, question: FitQuestion, options: dict[str, Any], as_json: bool
) -> None:
    assert isinstance(source.model, Architecture)
    result = answer(source.model, question)
    if as_json:
        say_json(_about(source, options) | result.model_dump() | {"fits": not result.short})
    else:
        rows = []
        for row in result.rows:
            size = row.n_bytes / GIB
            # less than nothing is what the card is short of
            rows.append([row.what, f"{size:10.2f}" if size >= 0 else f"none, {-size:.2f} short"])
        # the KV cache is what everything else leaves: the error of that sum is its uncertainty
        between = (
            f" ({result.low_tokens:,} to {result.high_tokens:,} if the rest is off by"
            f" {gib(result.margin_bytes)})"
        )
        _print(
            heading(source, question.engine, options),
            log.table(["on each card", "       GiB"], rows),
            "",
            f"KV cache in {result.kv}: {result.room.kv_token_bytes:,} bytes a token on each card,"
            f" room for {result.room.kv_tokens:,} tokens"
            f"{between if question.measured_bytes is None else ''}.",
            *result.notes,
            *([_BETWEEN_NODES] if options["nodes"] > 1 else []),
            *disk_lines(source, options),
        )
        # by the low estimate: a promise that holds if the weights turn out larger
        requests = log.count(result.low_tokens // question.context, "request")
        room = f"room for at least {requests} of {question.context:,} tokens"
        verdict = f"does not fit: {result.short}" if result.short else f"fits: {room}"
        _print(f"{source.name} {verdict}.")
    if result.short:
        hint = parallel_hint(source.model, question, result, options["gpus"], options["nodes"])
        raise DoesNotFit(f"{source.name}: {result.short}", hint)


def _hybrid(source: ModelSource, model: GgufModel, options: dict[str, Any], as_json: bool) -> None:
    cards = shown_bytes(options["vram"])
    machine = placement.FitMachine(options["gpus"], cards, options["headroom"], options["ram"])
    if options["mla"] != "3" and not model.is_mla:
        raise click.UsageError(f"--mla {options['mla']}: {source.name} is no MLA model.")
    mla: Any = int(options["mla"])
    batch = placement.Batch(
        options["ctx"], options["kv"] or "bf16", options["ubatch"], options["batch"], mla
    )
    # no memory helps here, so that the table would mislead
    if batch.context > model.context:
        raise DoesNotFit(
            f"--ctx {batch.context}: the model knows only {model.context} positions",
            f"Ask for at most {model.context}.",
        )
    try:
        given = options["check_ot"]
        rules = placement.read_placement_overrides(given, machine.devices) if given else None
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--check-ot") from error
    layout = (
        placement.checked_layout(model, machine, batch, rules)
        if rules
        else placement.place(model, machine, batch)
    )
    if as_json:
        fits = {"fits": not placement.shortage(layout, machine)}
        say_json(
            _about(source, options) | placement.layout_json(model, batch, layout, machine) | fits
        )
    else:
        head = ["GiB", "weights", "KV cache", "buffers", "together", "still free"]
        flags = " \\\n  ".join(placement.launch_lines(model, batch, layout))
        _print(
            heading(source, "ik_llama", options),
            log.table(head, placement.layout_rows(layout, machine)),
            *("", *placement.layout_notes(model, batch, layout), "", f"  {flags}", ""),
            *disk_lines(source, options),
        )
    if short := placement.shortage(layout, machine):
        raise DoesNotFit(f"{source.name}: {short}", hybrid_hint(model, machine, batch, layout))
    if not as_json:
        _print(f"{source.name} fits, with {gib(machine.headroom_bytes)} kept free on each card.")


def _about(source: ModelSource, options: dict[str, Any]) -> dict[str, Any]:
    seconds = source.disk_bytes / options["mbps"] / 1e6 if options["mbps"] else None
    return {
        "name": source.name,
        "recipe": options.get("recipe"),
        **({"nodes": options["nodes"]} if options["nodes"] > 1 else {}),
        "origin": source.origin,
        "disk_bytes": source.disk_bytes,
        "disk_is_estimate": source.is_estimate,
        "download_s": seconds,
    }


def _print(*lines: str) -> None:
    click.echo("\n".join(lines))


def heading(source: ModelSource, engine: str, options: dict[str, Any]) -> str:
    """What is asked, and where the answer comes from."""
    nodes = options["nodes"]
    cards = f"{log.count(options['gpus'] // nodes, 'card')} of {gib(options['vram'])}"
    cards = f"{nodes} nodes with {cards} each" if nodes > 1 else cards
    return f"{source.name} on {cards} with {engine}\nread from: {source.origin}\n"


def disk_lines(source: ModelSource, options: dict[str, Any]) -> list[str]:
    """What it takes on a disk, and how long to bring it."""
    about = " by the sum of its tensors" if source.is_estimate else ""
    # every rank reads the files of its own node
    on_each = " on each node" if options["nodes"] > 1 else ""
    lines = [f"Disk: {log.size(source.disk_bytes)} ({gib(source.disk_bytes)}){on_each}{about}."]
    if options["mbps"]:
        seconds = source.disk_bytes / options["mbps"] / 1e6
        hours, minutes = divmod(round(seconds / 60), 60)
        lines.append(f"Download at {options['mbps']:g} MB/s: {hours} h {minutes:02} min.")
    return lines
