"""`image rebuild --on slurm`: nodes build images from nothing, and must get the same bytes.

A node needs no first build: it builds from the locks of its checkout, and sends the digests of the
image and of its layers. Bytes do not travel, so a difference is named by its layer.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.app.build import build_again
from pipeline.app.images import find_image, plans_of
from pipeline.app.on_slurm import NodeReply, SlurmNodes, SlurmOrder
from pipeline.app.workspace import Workspace
from pipeline.artifacts.store.store import open_store
from pipeline.core import log
from pipeline.core.errors import NotReproducible, PipelineError, SlurmUnavailable
from pipeline.core.model import canonical_json, sha256_of
from pipeline.images.assemble.image import Built, code_digest
from pipeline.images.assemble.plan import ImagePlan
from pipeline.images.fetch.base_settings import BaseSettings
from pipeline.images.gate.smem.results import CaseReply
from pipeline.images.gate.smem.run import AnswerTarget, kept_or_asked


class RebuildAnswer(CaseReply):
    """What a machine built from an image's inputs."""

    ended: Literal["built", "died"]
    node: str = ""
    digest: str = ""
    layers: list[tuple[str, str]] = []  # titles and digests, from the bottom


@dataclass(frozen=True)
class RebuildCase:
    """An image to build again; `first` is what it must be equal to, where that is known."""

    plan: ImagePlan
    first: Built | None = None
    timeout_s: int = 0  # none is expected to take longer than the others

    @property
    def name(self) -> str:
        return self.plan.spec.name


@dataclass(frozen=True)
class RebuildTarget(AnswerTarget[RebuildCase, RebuildAnswer]):
    """Rebuilds; their keys have all that decides an image's bytes."""

    @property
    def answer_type(self) -> type[RebuildAnswer]:
        return RebuildAnswer

    @property
    def digests(self) -> dict[str, str]:
        return {"builder": code_digest()}

    def key(self, case: RebuildCase) -> str:
        """Made of the builder and the inputs, like the keys of images in the store."""
        return sha256_of(canonical_json({"rebuild": case.plan.key, **self.digests}))

    def keep(self, case: RebuildCase, answer: RebuildAnswer) -> None:
        """Keeps only equal results: after a difference the next run asks again."""
        if case.first and answer.digest == case.first.digest:
            super().keep(case, answer)


@dataclass(frozen=True)
class NodeRebuild:
    """An image of the store, and what a node made of the same inputs."""

    first: Built
    answer: RebuildAnswer
    kept: bool

    @property
    def verdict(self) -> Literal["identical", "different", "unknown"]:
        if self.answer.ended != "built":
            return "unknown"
        return "identical" if self.answer.digest == self.first.digest else "different"

    @property
    def error(self) -> PipelineError | None:
        """The error that follows, with the first layer that differs."""
        which = f"{self.first.name} for {self.first.platform}"
        if self.verdict == "unknown":
            return SlurmUnavailable(f"{which}: {self.answer.message}")
        if self.verdict == "identical":
            return None
        own = [(layer.title, layer.record.digest) for layer in self.first.layers]
        found = [pair for pair in zip(own, self.answer.layers, strict=False) if pair[0] != pair[1]]
        why = f"{len(own)} layers here, {len(self.answer.layers)} there"
        if found:
            (title, digest), (other, differs) = found[0]
            why = f"layer {title!r} is {digest} here, {other!r} is {differs} there"
        elif len(own) == len(self.answer.layers):
            why = "all layers are equal, the config or manifest differs"
        fix = f"`sm120 image rebuild {self.first.name}` on either machine names the file."
        return NotReproducible(f"{which}: {self.answer.node} built other bytes: {why}", fix)


def rebuild_on_nodes(
    workspace: Workspace,
    names: Sequence[str],
    slurm: SlurmOrder,
    *,
    platform: str | None = None,
    offline: bool = False,
) -> list[NodeRebuild]:
    """Let nodes build images again, each in a job of its own, and compare digests."""
    checkout, store = workspace.checkout(), workspace.store()
    done: list[NodeRebuild] = []
    with store.in_use():
        firsts = [find_image(checkout, store, name, platform) for name in dict.fromkeys(names)]
        for each in sorted({first.platform for first in firsts}):
            cases = [RebuildCase(x.plan, x) for x in firsts if x.platform == each]
            words = ["image", "answer", *(case.name for case in cases), "--platform", each]
            words += ["--offline"] if offline else []
            # compiling and compressing take every core
            nodes = SlurmNodes(slurm, words, checkout.root, "image", 1, "--exclusive")
            with log.step(f"Building {log.count(len(cases), 'image')} for {each} on nodes"):
                answered = kept_or_asked(RebuildTarget(store, ask=nodes.ask), cases)
            done += [NodeRebuild(case.first, a, kept) for case, a, kept in answered if case.first]
    return done


def answer_rebuilds(
    workspace: Workspace,
    names: tuple[str, ...],
    keys: Sequence[str],
    *,
    platform: str | None = None,
    mirrors: tuple[str, ...] = (),
    offline: bool = False,
    bases: BaseSettings | None = None,
) -> Iterator[NodeReply]:
    """Build the images whose keys were sent from nothing, for a machine that asks over Slurm."""
    # at once: whoever asked counts the time from here, not from the queue
    node = socket.gethostname()
    yield NodeReply(node=node)
    checkout, store = workspace.checkout(), workspace.store()
    target = RebuildTarget(store)
    yield NodeReply(about=target.digests)
    for plan in plans_of(checkout, names, platform):
        if (key := target.key(RebuildCase(plan))) not in keys:
            continue
        with store.in_use(), store.scratch() as folder:
            empty = open_store(folder / "store")
            second = build_again(workspace, empty, plan, mirrors, offline, bases)
        layers = [(layer.title, layer.record.digest) for layer in second.layers]
        answer = RebuildAnswer(
            case=second.name, ended="built", node=node, digest=second.digest, layers=layers
        )
        yield NodeReply(key=key, answer=answer.model_dump(mode="json"))
