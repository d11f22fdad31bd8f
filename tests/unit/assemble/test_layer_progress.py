"""How far the writing of layers is, as a person sees it."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from pipeline.core import log
from pipeline.images.assemble.locked_layers import CountedFile, watch
from pipeline.images.assemble.plan import LayerKind, LayerPlan
from pipeline.images.lock.model import WheelPin


def layer(name: str, size_bytes: int) -> LayerPlan:
    pin = WheelPin(
        name=name,
        version="1",
        file=f"{name}-1-py3-none-any.whl",
        sha256="0" * 64,
        size_bytes=size_bytes,
    )
    return LayerPlan(title=name, kind=LayerKind.WHEELS, architecture="amd64", pins=(pin,))


class Shown:
    """The bytes that a bar was told of."""

    def __init__(self) -> None:
        self.total, self.steps = 0, list[int]()

    def advance(self, n_bytes: int) -> None:
        self.steps.append(n_bytes)

    def __call__(self, title: str, total_bytes: int) -> Shown:
        self.total = total_bytes
        return self

    def __enter__(self) -> Shown:
        return self

    def __exit__(self, *_: object) -> None:
        return


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()
    monkeypatch.setattr(log, "progress", shown)
    monkeypatch.setattr("pipeline.images.assemble.locked_layers._LOOK_EVERY_S", 0.01)
    return shown


def test_a_file_counts_what_is_written_to_it(tmp_path: Path) -> None:
    counts = [0, 0]
    with CountedFile(tmp_path / "blob", counts, 1) as out:
        out.write(b"abc")
        out.write(b"de")
    assert list(counts) == [0, 5]
    assert (tmp_path / "blob").read_bytes() == b"abcde"


def test_what_is_left_to_write_is_shown_as_it_grows(shown: Shown) -> None:
    layers = [layer("done", 50), layer("big", 1000), layer("small", 100)]
    futures = {Future[None](): one for one in layers}
    done, big, small = futures
    counts = [0] * len(layers)
    counts[:] = [50, 300, 0]
    done.set_result(None)
    steps = watch(layers, futures, counts)
    next(steps)
    # of the layer that is half written, only the other half is still to come
    assert shown.total == 700 + 100
    # more than the files have: the headers of an archive count, too
    counts[1], counts[2] = 900, 120
    next(steps)
    assert sum(shown.steps) == 600 + 100
    big.set_result(None)
    small.set_result(None)
    assert list(steps) == []
    assert sum(shown.steps) <= shown.total


def test_nothing_is_shown_of_layers_that_are_all_there(shown: Shown) -> None:
    one = layer("one", 10)
    future = Future[None]()
    future.set_result(None)
    assert list(watch([one], {future: one}, [0])) == []
    assert (shown.total, shown.steps) == (0, [])
