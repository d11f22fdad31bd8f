"""How far a start is, read from the engine's own log."""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeline.recipe.model import Engine


class Stage(NamedTuple):
    """A step of a start, and the line that an engine writes about it.

    A pattern with the groups `done` and `total` counts; others only tell that a step is reached.
    """

    title: str
    pattern: str


class Progress(NamedTuple):
    """Where a start is."""

    title: str
    done: int | None = None
    total: int | None = None

    def __str__(self) -> str:
        return self.title if self.total is None else f"{self.title}: {self.done} of {self.total}"


# vLLM's loaders share one form of line, which SGLang took over.
_SHARDS = Stage(
    "loading weights, files",
    r"Loading [\w ./-]+: +\d+% Completed \| (?P<done>\d+)/(?P<total>\d+)",
)
_VLLM = (
    _SHARDS,
    Stage("weights are loaded", r"Loading weights took [\d.]+ seconds"),
    Stage("compiling", r"Using cache directory: \S+ for vLLM's torch\.compile"),
    Stage("compiled", r"torch\.compile (?:and [\w/ ]+ )?(?:takes|took) [\d.]+ s"),
    Stage(
        "capturing CUDA graphs",
        r"Capturing CUDA graphs[^|]*: +\d+%\|[^|]*\| (?P<done>\d+)/(?P<total>\d+)",
    ),
    Stage("CUDA graphs are captured", r"Graph capturing finished in \d+ secs"),
    Stage("starting the HTTP server", r"Starting vLLM (?:API )?server"),
)
_SGLANG = (
    _SHARDS,
    Stage("loading weights", r"Load weight begin\."),
    Stage("weights are loaded", r"Load weight end\."),
    Stage("KV cache is allocated", r"KV Cache is allocated\."),
    Stage(
        "capturing CUDA graphs",
        r"Capturing batches[^|]*: +\d+%\|[^|]*\| (?P<done>\d+)/(?P<total>\d+)",
    ),
    Stage("CUDA graphs are captured", r"Capture cuda graph end\."),
    Stage("ready", r"The server is fired up and ready to roll!"),
)
_LLAMA = (
    Stage("loading the model", r"load_model: loading model '"),
    Stage("reading the model's head", r"llama_model_loader: loaded meta data with"),
    Stage(
        "layers on cards",
        r"load_tensors: offloaded (?P<done>\d+)/(?P<total>\d+) layers to GPU",
    ),
    Stage("the model is loaded", r"(?:init|main)(?:\]|:) model loaded"),
)
STAGES: dict[Engine, tuple[Stage, ...]] = {
    "vllm": _VLLM,
    "sglang": _SGLANG,
    "llama-cpp": _LLAMA,
    "ik-llama": _LLAMA,
}
# Lines after which an engine never answers, though its process goes on.
FATAL: dict[Engine, str] = {
    # its HTTP server outlives the scheduler
    "sglang": r"Scheduler hit an exception: Traceback",
}
# Nothing that is looked for stands behind this many characters.
_LONGEST = 4000
_COMPILED = {
    engine: tuple((stage.title, re.compile(stage.pattern)) for stage in stages)
    for engine, stages in STAGES.items()
}


def read_progress(engine: Engine, line: str) -> Progress | None:
    """What a line tells about the start; none where it tells nothing."""
    for title, pattern in _COMPILED[engine]:
        if match := pattern.search(line[:_LONGEST]):
            counts = match.groupdict()
            if counts:
                return Progress(title, int(counts["done"]), int(counts["total"]))
            return Progress(title)
    return None


def is_ready(engine: Engine, progress: Progress) -> bool:
    """Whether an engine says that it listens, or is about to: the last stage of each."""
    return progress.title == STAGES[engine][-1].title


def is_fatal(engine: Engine, line: str) -> bool:
    """Whether an engine says that it will not come up."""
    pattern = FATAL.get(engine)
    return pattern is not None and re.search(pattern, line[:_LONGEST]) is not None
