from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from pipeline.core.model import sha256_of
from pipeline.serving.recipe.tiny import WORDS, Tensor, dump_gguf, tiny_gguf
from tests.testbed import tiny_gguf as reference


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> GGUFReader:
    path = tmp_path_factory.mktemp("ours") / "tiny.gguf"
    path.write_bytes(tiny_gguf())
    return GGUFReader(path)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> GGUFReader:
    """The same model, written by ggml's own writer."""
    path = tmp_path_factory.mktemp("theirs") / "tiny.gguf"
    reference.write_tiny_gguf(path)
    return GGUFReader(path)


def head(reader: GGUFReader) -> dict[str, Any]:
    # the reader adds fields of its own for the file's head
    names = (name for name in reader.fields if not name.startswith("GGUF."))
    return {name: (reader.fields[name].types, reader.fields[name].contents()) for name in names}


def test_it_says_of_itself_what_ggml_s_own_writer_says_of_it(
    ours: GGUFReader, theirs: GGUFReader
) -> None:
    assert head(ours) == head(theirs)


def test_it_has_the_same_tensors_of_the_same_shapes_and_kinds(
    ours: GGUFReader, theirs: GGUFReader
) -> None:
    def shapes(reader: GGUFReader) -> dict[str, tuple[list[int], str]]:
        return {t.name: (t.shape.tolist(), t.tensor_type.name) for t in reader.tensors}

    assert shapes(ours) == shapes(theirs)


def test_its_numbers_are_as_large_as_those_of_the_reference(
    ours: GGUFReader, theirs: GGUFReader
) -> None:
    other = {t.name: t.data.astype(np.float32) for t in theirs.tensors}
    for tensor in ours.tensors:
        mine, wanted = tensor.data.astype(np.float32), other[tensor.name]
        assert mine.shape == wanted.shape
        assert mine.mean() == pytest.approx(wanted.mean(), abs=0.1), tensor.name
        # eight numbers of a bias say little about their spread
        if mine.size > 100:
            assert mine.std() == pytest.approx(wanted.std(), rel=0.1), tensor.name


def test_each_word_calls_the_next_by_its_planted_rows(ours: GGUFReader) -> None:
    tensors = {t.name: t.data.astype(np.float32) for t in ours.tensors}
    tokens = ours.fields["tokenizer.ggml.tokens"].contents()
    rows = [tokens.index(reference.as_token(word)) for word in WORDS]
    for row, following in zip(rows, rows[1:] + rows[:1], strict=True):
        scores = tensors["output.weight"] @ tensors["token_embd.weight"][row]
        assert int(scores.argmax()) == following


def test_the_known_text_is_that_of_the_reference() -> None:
    assert WORDS == reference.WORDS


def test_it_is_the_same_bytes_everywhere() -> None:
    assert sha256_of(tiny_gguf()) == (
        "sha256:229f3856636801ab587cc507a26855245234584a6ba8ba37b644416099e0a776"
    )


def test_a_shape_that_does_not_fit_its_numbers_is_an_error() -> None:
    with pytest.raises(struct.error):
        dump_gguf({}, {"a": Tensor((2, 3), [1.0] * 5)})


def test_a_value_of_another_kind_is_an_error() -> None:
    with pytest.raises(struct.error):
        dump_gguf({"a": -1}, {})
