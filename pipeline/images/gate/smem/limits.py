"""What a block may use on each architecture the gate can judge."""

from __future__ import annotations

from pipeline.core.errors import GateInvalid
from pipeline.core.model import Frozen


class Card(Frozen):
    """A GPU as engines and Triton ask about it.

    `shared_bytes` is what a block may have at most (cudaDevAttrMaxSharedMemoryPerBlockOptin),
    the number that Triton compares with a kernel's need. `name` is what engines look up tuned
    configurations by, so it is the whole name that the driver reports.
    """

    arch: str
    capability: tuple[int, int]
    shared_bytes: int
    shared_bytes_per_sm: int
    multiprocessors: int
    threads_per_sm: int
    memory_bytes: int
    name: str
    registers_per_sm: int = 65536  # a field: what is written of a card must be readable again


# "Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide: 99 KB a block
# on 8.6, 8.9 and 12.x, 227 KB on 9.0 and 10.x. Engines that take every newer card for one with the
# larger amount fail on 12.x: https://github.com/sgl-project/sglang/issues/14322 (106,496 bytes),
# https://github.com/vllm-project/vllm/issues/46721 (102,400 bytes).
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#compute-capabilities
# As GB10 itself reports it: https://github.com/QwenLM/FlashQLA/issues/4. Its 128 GB are shared with
# the processor, so what the driver reports is a little less; no block size depends on that.
CARDS = {
    arch: Card(
        arch=arch,
        capability=(int(arch[3:-1]), int(arch[-1])),
        shared_bytes=shared,
        # the driver keeps one kilobyte of each multiprocessor's memory for every block
        shared_bytes_per_sm=shared + 1024,
        multiprocessors=processors,
        threads_per_sm=threads,
        memory_bytes=memory_gib << 30,
        name=name,
    )
    for arch, shared, processors, threads, memory_gib, name in (
        ("sm_120", 101376, 188, 1536, 96, "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
        ("sm_121", 101376, 48, 1536, 128, "NVIDIA GB10"),
        ("sm_100", 232448, 148, 2048, 180, "NVIDIA B200"),
        ("sm_90", 232448, 132, 2048, 80, "NVIDIA H100 80GB HBM3"),
        ("sm_89", 101376, 142, 1536, 48, "NVIDIA L40S"),
        ("sm_86", 101376, 84, 1536, 48, "NVIDIA RTX A6000"),
    )
}


def card_for(arch: str) -> Card:
    """The card that the gate judges for an architecture."""
    if arch not in CARDS:
        raise GateInvalid(
            f"{arch}: is not a known card (known: {', '.join(CARDS)})", "Choose one of those."
        )
    return CARDS[arch]
