"""What a model is made of, as far as its memory is concerned."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.model import Frozen

Count = Annotated[int, Field(ge=1, le=1 << 24)]


class Mla(Frozen):
    """Attention that keeps one small latent per token, whatever the number of heads."""

    kind: Literal["mla"] = "mla"
    heads: Count
    q_rank: Annotated[int, Field(ge=0, le=1 << 20)]  # 0: queries are not compressed
    kv_rank: Count
    rope: Count
    nope: Count
    value: Count


class Gqa(Frozen):
    """Attention in which groups of heads share a key and a value."""

    kind: Literal["gqa"] = "gqa"
    heads: Count
    kv_heads: Count
    head: Count
    bias: bool = False


class Moe(Frozen):
    """Routed experts, and those that every token visits."""

    experts: Count
    active: Count
    shared: Annotated[int, Field(ge=0, le=1 << 10)] = 0
    width: Count
    layers: Count  # how many of the model's layers are of this kind


class Vision(Frozen):
    """A vision tower and its projector into the text model."""

    layers: Count
    hidden: Count
    width: Count
    patch: Count
    positions: Count
    merge: Count  # how many patches become one token

    def parameters(self, text_hidden: int) -> int:
        """All of the tower and the projector, biases and norms included."""
        h, w, merged = self.hidden, self.width, self.hidden * self.merge
        block = 4 * h * h + 4 * h + 2 * h * w + w + h + 4 * h
        patches = 3 * self.patch * self.patch * h + h + self.positions * h
        projector = 2 * h + merged * merged + merged + merged * text_hidden + text_hidden
        return self.layers * block + patches + 2 * h + projector


class Scheme(Frozen):
    """How weights are stored: their bits, and what each group of them carries besides."""

    name: str
    bits: Annotated[int, Field(ge=2, le=32)]
    group: Annotated[int, Field(ge=0, le=1 << 16)] = 0  # 0: no scales
    group_bytes: float = 0.0  # scale, and zero point where there is one
    block: Annotated[int, Field(ge=0, le=1 << 14)] = 0  # a group is a square of this side, no run


class Precision(Frozen):
    """The storage of each kind of weight; embeddings and routers are never quantised."""

    base: Scheme
    attention: Scheme
    experts: Scheme
    shared: Scheme
    dense: Scheme
    head: Scheme
    kv_fp8: bool = False  # the checkpoint asks for an fp8 KV cache


class Architecture(Frozen):
    """A model by the numbers that decide how much memory it needs."""

    family: str
    layers: Count
    hidden: Count
    vocabulary: Count
    context: Count
    dense_width: Annotated[int, Field(ge=0, le=1 << 24)]
    tied: bool = False
    predictors: Annotated[int, Field(ge=0, le=64)] = 0  # layers for multi-token prediction
    attention: Annotated[Mla | Gqa, Field(discriminator="kind")]
    moe: Moe | None = None
    vision: Vision | None = None
    precision: Precision

    @property
    def dense_layers(self) -> int:
        return self.layers - (self.moe.layers if self.moe else 0)
