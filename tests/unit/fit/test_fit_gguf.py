from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.core.errors import ModelUnreadable
from pipeline.serving.fit.gguf import BY_NUMBER, read_gguf
from pipeline.serving.fit.placement import Batch, llama_token_bytes
from tests.testbed.tiny_gguf import write_tiny_gguf
from tests.unit.fit.gguf_bytes import DATA, F32, IQ4_KS, LLAMA, TENSORS, gguf, tensor, text

WHOLE = gguf(LLAMA, TENSORS, DATA)


def put(folder: Path, data: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_types_have_the_sizes_that_the_gguf_package_knows() -> None:
    ours = {number: (kind.values, kind.n_bytes) for number, kind in BY_NUMBER.items()}
    theirs = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    shared = ours.keys() & theirs.keys()
    assert len(shared) > 28
    assert {n: ours[n] for n in shared} == {n: theirs[n] for n in shared}


def test_a_head_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    ours, theirs = read_gguf(path), GGUFReader(path)
    assert {t.name: t.n_bytes for t in ours.tensors} == {
        t.name: int(t.n_bytes) for t in theirs.tensors
    }
    assert {t.name: list(t.shape) for t in ours.tensors} == {
        t.name: [int(n) for n in t.shape] for t in theirs.tensors
    }
    assert ours.layers == 2


def test_an_mla_model_with_experts_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    model = read_gguf(path)
    assert (model.layers, model.hidden, model.kv_values) == (2, 64, [576, 576])
    assert (model.experts, model.active, model.expert_width) == (8, 2, 32)


MLA = {key.replace("llama.", "deepseek2."): value for key, value in LLAMA.items()} | {
    "general.architecture": "deepseek2",
    "deepseek2.attention.kv_lora_rank": 512,
    "deepseek2.rope.dimension_count": 64,
}
OLDER = {"deepseek2.attention.key_length": 192, "deepseek2.attention.value_length": 128}
NEWER = {
    "deepseek2.attention.head_count_kv": 1,
    "deepseek2.attention.key_length": 576,
    "deepseek2.attention.value_length": 512,
    "deepseek2.attention.key_length_mla": 192,
    "deepseek2.attention.value_length_mla": 128,
}


@pytest.mark.parametrize("lengths", [OLDER, NEWER])
def test_the_heads_of_an_mla_model_are_read_from_older_and_newer_files(
    lengths: dict[str, int], tmp_path: Path
) -> None:
    model = read_gguf(put(tmp_path, gguf(MLA | lengths, TENSORS, DATA)))
    assert (model.kv_values, model.heads, model.head_values) == ([576], 4, 320)
    full, latent = (llama_token_bytes(model, Batch(4096, "bf16", mla=mode)) for mode in (0, 1))
    assert (full, latent) == (4 * 320 * 2, 576 * 2)


@pytest.mark.parametrize("missing", ["head_count", "key_length and value_length"])
def test_heads_that_a_file_does_not_name_are_asked_for_with_mla_0_alone(
    missing: str, tmp_path: Path
) -> None:
    keys = dict(MLA) if "key" in missing else MLA | OLDER
    if "key" not in missing:
        del keys["deepseek2.attention.head_count"]
    model = read_gguf(put(tmp_path, gguf(keys, TENSORS, DATA)))
    assert llama_token_bytes(model, Batch(4096, "bf16", mla=3)) == 576 * 2
    with pytest.raises(ModelUnreadable, match="-mla 0: the file does not say"):
        llama_token_bytes(model, Batch(4096, "bf16", mla=0))


def test_heads_that_share_keys_cost_their_own_number(tmp_path: Path) -> None:
    model = read_gguf(put(tmp_path, WHOLE))
    assert model.kv_values == [2 * (16 + 16)]


def test_any_architecture_is_read_by_its_keys_and_layers_may_differ(tmp_path: Path) -> None:
    keys = {key.replace("llama.", "newest."): value for key, value in LLAMA.items()}
    keys |= {"general.architecture": "newest", "newest.block_count": 3}
    keys |= {"newest.attention.head_count_kv": [2, 0, 1], "newest.attention.sliding_window": 128}
    tensors = [*TENSORS, tensor("blk.1.ssm_in.weight", (64, 64), F32, DATA)]
    tensors.append(tensor("blk.2.attn_q.weight", (64, 64), F32, DATA + 64 * 64 * 4))
    model = read_gguf(put(tmp_path, gguf(keys, tensors, DATA + 2 * 64 * 64 * 4)))
    assert model.kv_values == [2 * 32, 0, 32]
    assert "have a window" in model.bounds[0]
    assert "states of 1 layers" in model.bounds[1]


def test_a_layer_with_a_state_keeps_no_tokens(tmp_path: Path) -> None:
    tensors = [*TENSORS, tensor("blk.0.ssm_in.weight", (64, 64), F32, DATA)]
    model = read_gguf(put(tmp_path, gguf(LLAMA, tensors, DATA + 64 * 64 * 4)))
    assert model.kv_values == [0]
    assert (model.vocabulary, model.is_mla, model.experts) == (3, False, 0)


def test_only_the_head_of_a_large_file_is_read(tmp_path: Path) -> None:
    path = put(tmp_path, gguf(LLAMA, TENSORS, 0))
    with path.open("r+b") as handle:
        handle.truncate(600_000_000_000)  # a hole: no disk is used
    assert len(read_gguf(path).tensors) == 2


def test_bytes_that_rows_carry_are_taken_from_the_files_layout(tmp_path: Path) -> None:
    rows = [
        tensor("token_embd.weight", (256, 8), IQ4_KS, 0),
        tensor("blk.0.attn_norm.weight", (8,), F32, 1152),
    ]
    model = read_gguf(put(tmp_path, gguf(LLAMA | {"llama.embedding_length": 256}, rows, 1152 + 32)))
    assert [t.n_bytes for t in model.tensors] == [8 * 136 + 64, 32]


def split_parts() -> list[bytes]:
    split = {"split.count": 2, "split.tensors.count": 2}
    return [
        gguf(LLAMA | split | {"split.no": 0}, TENSORS[:1], 768),
        gguf(split | {"split.no": 1}, [tensor("blk.0.attn_q.weight", (64, 64), 8, 0)], 4352),
    ]


def put_parts(folder: Path, parts: list[bytes]) -> Path:
    names = [f"m-{n + 1:05}-of-{len(parts):05}.gguf" for n in range(len(parts))]
    return [put(folder, part, name) for part, name in zip(parts, names, strict=True)][-1]


def test_all_parts_of_a_split_model_are_read_from_any_of_them(tmp_path: Path) -> None:
    last = put_parts(tmp_path, split_parts())
    assert len(read_gguf(last).tensors) == 2


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    last = put_parts(tmp_path, split_parts())
    last.with_name("m-00001-of-00002.gguf").unlink()
    with pytest.raises(ModelUnreadable, match=r"1 of 2 parts are missing, m-00001-of-00002\.gguf"):
        read_gguf(last)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split.no": 0}, "is numbered as part 0"),
        ({"split.count": 3}, "one of 3 parts, not 2"),
    ],
)
def test_parts_that_disagree_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    split = {"split.count": 2, "split.no": 1} | change
    second = gguf(split, [tensor("blk.0.attn_q.weight", (64, 64), 8, 0)], 4352)
    with pytest.raises(ModelUnreadable, match=message):
        read_gguf(put_parts(tmp_path, [split_parts()[0], second]))


def test_a_part_without_a_number_is_refused(tmp_path: Path) -> None:
    second = gguf({"split.count": 2}, [tensor("blk.0.attn_q.weight", (64, 64), 8, 0)], 4352)
    with pytest.raises(ModelUnreadable, match="is numbered as part None"):
        read_gguf(put_parts(tmp_path, [split_parts()[0], second]))


@pytest.mark.parametrize("count", ["two", 7])
def test_a_number_of_parts_that_is_none_is_refused(tmp_path: Path, count: Any) -> None:
    with pytest.raises(ModelUnreadable, match=f"one of {count} parts, not 1"):
        read_gguf(put(tmp_path, gguf(LLAMA | {"split.count": count}, TENSORS, DATA)))


def test_a_part_that_lost_a_tensor_is_refused(tmp_path: Path) -> None:
    empty = gguf({"split.count": 2, "split.no": 1}, [], 0)
    with pytest.raises(ModelUnreadable, match="2 tensors announced, 1 listed"):
        read_gguf(put_parts(tmp_path, [split_parts()[0], empty]))


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    second = gguf({"split.count": 2, "split.no": 1}, TENSORS[:1], 768)
    with pytest.raises(ModelUnreadable, match="two of its parts"):
        read_gguf(put_parts(tmp_path, [split_parts()[0], second]))


def test_a_part_alone_under_another_name_is_not_the_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match="one of 2 parts, not 1"):
        read_gguf(put(tmp_path, split_parts()[0]))


HUGE = 1 << 62
BROKEN = {
    "empty": (b"", "beyond the end"),
    "magic": (gguf(LLAMA, TENSORS, DATA, magic=b"GGML"), "is not a GGUF file"),
    "version": (gguf(LLAMA, TENSORS, DATA, version=9), "version 9"),
    "old version": (gguf(LLAMA, TENSORS, DATA, version=1), "version 1"),
    "tensors": (gguf(LLAMA, TENSORS, DATA, counts=(HUGE, 7)), "claims"),
    "keys": (gguf(LLAMA, TENSORS, DATA, counts=(2, HUGE)), "claims"),
    "more tensors": (gguf(LLAMA, TENSORS, 0, counts=(200, 7)), "beyond|claims|dimensions|type"),
    "key length": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", HUGE),
        "claims 4611686018427387904 bytes",
    ),
    "string length": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IQ", 8, 1000),
        "beyond the end",
    ),
    "array length": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 4, HUGE),
        "claims",
    ),
    "array of arrays": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1),
        "array of type 9",
    ),
    "value type": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 77),
        "type 77",
    ),
    "not text": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2) + b"\xff\xfe",
        "not text",
    ),
    "twice": (gguf(LLAMA, [TENSORS[0], TENSORS[0]], DATA), "a tensor twice"),
    "overlap": (
        gguf(LLAMA, [TENSORS[0], tensor("b", (64, 64), 8, 32)], DATA),
        "does not fit at its offset",
    ),
    "not aligned": (gguf(LLAMA, [tensor("b", (8,), 0, 7)], DATA), "not aligned"),
    "beyond": (gguf(LLAMA, [tensor("b", (64, 64), 8, 1 << 40)], DATA), "does not fit"),
    "cut short": (WHOLE[:-1], "does not fit"),
    "dimensions": (gguf(LLAMA, [tensor("b", (1,) * 9, 0, 0)], DATA), "9 dimensions"),
    "no dimensions": (gguf(LLAMA, [tensor("b", (), 0, 0)], DATA), "0 dimensions"),
    "empty tensor": (gguf(LLAMA, [tensor("b", (0, 4), 0, 0)], DATA), "cannot be f32"),
    "overflow": (gguf(LLAMA, [tensor("b", (1 << 40,) * 4, 0, 0)], DATA), "cannot be f32"),
    "half a block": (gguf(LLAMA, [tensor("b", (33, 4), 8, 0)], DATA), "cannot be q8_0"),
    "unknown type": (gguf(LLAMA, [tensor("b", (32,), 250, 0)], DATA), "type 250"),
    "alignment": (gguf(LLAMA | {"general.alignment": 33}, TENSORS, DATA), "alignment is 33"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_or_hostile_file_is_refused(tmp_path: Path, name: str) -> None:
    data, message = BROKEN[name]
    with pytest.raises(ModelUnreadable, match=message):
        read_gguf(put(tmp_path, data))


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    twice = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (text("a") + struct.pack("<II", 4, 1)) * 2
    with pytest.raises(ModelUnreadable, match="'a' twice"):
        read_gguf(put(tmp_path, twice))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "mamba"}, "mamba.embedding_length"),
        ({"general.architecture": 3}, "is not a name"),
        ({"llama.attention.head_count_kv": [2, 2]}, "not a count for each of 1 layers"),
        ({"llama.attention.head_count_kv": [1 << 31]}, "not a count for each of 1 layers"),
        ({"llama.attention.head_count": [4, 4]}, "not a count for each of 1 layers"),
        ({"llama.block_count": 2}, "block_count is 2, but it holds 1"),
        ({"llama.embedding_length": 128}, "embedding_length 128"),
        ({"llama.context_length": "many"}, "not a count"),
        ({"llama.attention.head_count": 0}, "0 heads"),
        ({"llama.attention.head_count": 5}, "5 heads"),
        ({"llama.attention.head_count_kv": ["2", "3"]}, "not a count"),
    ],
)
def test_metadata_that_cannot_be_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelUnreadable, match=message):
        read_gguf(put(tmp_path, gguf(LLAMA | change, TENSORS, DATA)))


@pytest.mark.parametrize("key", [k for k in LLAMA if "kv" not in k and "tokens" not in k])
def test_missing_metadata_is_refused(tmp_path: Path, key: str) -> None:
    metadata = {k: v for k, v in LLAMA.items() if k != key}
    with pytest.raises(ModelUnreadable):
        read_gguf(put(tmp_path, gguf(metadata, TENSORS, DATA)))


def test_a_file_without_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match="token_embd"):
        read_gguf(put(tmp_path, gguf(LLAMA, TENSORS[1:], DATA)))


def test_every_cut_of_a_head_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for length in range(0, len(WHOLE) - DATA):
        path.write_bytes(WHOLE[:length])
        with pytest.raises(ModelUnreadable):
            read_gguf(path)


HEAD = len(WHOLE) - DATA


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, HEAD - 1), value=st.integers(0, 255), more=st.binary(max_size=9))
def test_damage_is_refused_or_gives_nothing_larger_than_the_file(
    tmp_path: Path, at: int, value: int, more: bytes
) -> None:
    damaged = bytearray(WHOLE)
    damaged[at : at + 1 + len(more)] = bytes([value]) + more
    path = put(tmp_path, bytes(damaged))
    try:
        model = read_gguf(path)
    except ModelUnreadable:
        return
    assert model.n_bytes <= len(damaged)
