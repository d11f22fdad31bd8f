"""What a model is made of, as far as its memory is concerned."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.core.model import Frozen

Count = Annotated[int, Field(ge=1, le=1 << 40)]
Few = Annotated[int, Field(ge=0, le=1 << 40)]  # a count that may be none


class Mla(Frozen):
    """Attention that keeps one small latent per token, whatever the number of heads."""

    kind: Literal["mla"] = "mla"
    heads: Count
    q_rank: Few  # 0: queries are not compressed
    kv_rank: Count
    rope: Few
    nope: Count
    value: Count
    gate: bool = False  # a gate on the output, as wide as the values


class Gqa(Frozen):
    """Attention in which groups of heads share a key and a value."""

    kind: Literal["gqa"] = "gqa"
    heads: Count
    kv_heads: Count
    head: Count
    value: Count  # of a head; mostly as wide as a key
    bias: bool = False
    gate: bool = False  # queries bring a gate on the output along, as wide as themselves


class Compressed(Frozen):
    """Attention to a window of tokens and to all others in compressed runs (DeepSeek V4)."""

    kind: Literal["compressed"] = "compressed"
    heads: Count
    head: Count
    q_rank: Count
    groups: Count  # of heads, each with an output matrix of its own
    o_rank: Count
    ratio: Few  # tokens in a run; 0: the window alone
    index_heads: Few = 0
    index_head: Few = 0


class Linear(Frozen):
    """A state of fixed size for a request instead of a cache: Mamba-2, gated delta nets, KDA."""

    kind: Literal["linear"] = "linear"
    heads: Count
    divided: Count  # weights of a layer that cards share
    whole: Few  # weights of a layer that every card has
    state: Few  # float32 values of a request in a layer
    conv: Few  # values of a request in the model's own precision


class Indexer(Frozen):
    """What picks the tokens that attention looks at (DeepSeek sparse attention)."""

    heads: Count
    head: Count


class Mixer(Frozen):
    """A number of layers that mix tokens by the same attention."""

    layers: Count
    attention: Annotated[Mla | Gqa | Compressed | Linear, Field(discriminator="kind")]
    window: Few = 0  # tokens that are kept; 0: all
    indexer: Indexer | None = None


class Moe(Frozen):
    """Routed experts, and those that every token visits."""

    experts: Count
    active: Count
    width: Count
    layers: Count  # how many of the model's layers are of this kind
    hidden: Count  # what comes in: the model's hidden state, or a smaller latent one
    shared_width: Few = 0  # of all experts that every token visits
    bias: bool = False


class Vision(Frozen):
    """A vision tower and its projector into the text model."""

    layers: Count
    hidden: Count
    width: Count
    patch: Count
    positions: Count
    merge: Count  # how many patches become one token
    frames: Count = 1  # of a video that become one patch
    rated_layers: Count  # what sglang takes for the number of layers when it chooses its share

    def parameters(self, text_hidden: int) -> int:
        """All of the tower and the projector, biases and norms included."""
        h, w, merged = self.hidden, self.width, self.hidden * self.merge
        block = 4 * h * h + 4 * h + 2 * h * w + w + h + 4 * h
        patches = 3 * self.frames * self.patch * self.patch * h + h + self.positions * h
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
    linear: Scheme  # linear attention
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
    mixers: list[Mixer] = Field(min_length=1)
    dense_layers: Few
    dense_width: Few
    gated: bool = True  # feed-forward parts have a gate beside their up matrix
    tied: bool = False
    lookup: Few = 0  # weights of tables beside the embedding, in which every layer looks up tokens
    predictors: Annotated[int, Field(ge=0, le=64)] = 0  # layers for multi-token prediction
    moe: Moe | None = None
    vision: Vision | None = None
    precision: Precision
    bounds: list[str] = []  # what was not understood, and on which side it is counted
    unexplained_bytes: Few = 0  # of its files, beyond all known parts

    @property
    def attention(self) -> Mla | Gqa | Compressed | Linear:
        """The attention of the layers which keep all tokens; of the first ones if none do."""
        whole = [m for m in self.mixers if not m.window and m.attention.kind != "linear"]
        return (whole or self.mixers)[0].attention
