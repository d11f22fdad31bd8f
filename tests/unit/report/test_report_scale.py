from __future__ import annotations

import pytest

from pipeline.serving.report.chart import scale, tick_label


def test_a_linear_axis_starts_at_zero_and_ends_at_a_round_number() -> None:
    axis = scale("linear", [524, 1650], 0, 100)
    assert axis.ticks == (0, 500, 1000, 1500, 2000)
    assert (axis.at(0), axis.at(2000)) == (0, 100)


def test_small_values_have_ticks_without_rounding_errors() -> None:
    assert scale("linear", [0.29], 0, 1).ticks == (0, 0.1, 0.2, 0.3)


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0]])
def test_an_axis_without_a_value_above_zero_can_be_drawn(values: list[float]) -> None:
    axis = scale("linear", values, 0, 100)
    assert axis.ticks[0] == 0
    assert axis.at(0) == 0


def test_a_value_equal_to_a_tick_does_not_add_another() -> None:
    assert scale("linear", [1000], 0, 1).ticks[-1] == 1000


def test_each_decade_of_a_log_axis_is_as_wide_as_the_others() -> None:
    axis = scale("log", [1, 1000], 0, 300)
    assert [round(axis.at(v)) for v in (1, 10, 100, 1000)] == [0, 100, 200, 300]


def test_a_log_axis_of_few_decades_has_ticks_between_them() -> None:
    assert scale("log", [300, 9000], 0, 1).ticks == (200, 500, 1000, 2000, 5000, 10000)


def test_a_single_value_on_a_log_axis_stands_inside() -> None:
    axis = scale("log", [50], 0, 100)
    assert 0 < axis.at(50) < 100


def test_ticks_of_a_sweep_are_its_loads() -> None:
    assert scale("stepped", [32, 64, 128], 0, 400).ticks == (32, 64, 128)


def test_loads_that_lie_too_near_leave_their_tick_to_the_larger() -> None:
    assert scale("stepped", [500, 512, 1000, 1024], 0, 400).ticks == (512, 1024)


def test_a_sweep_of_one_load_can_be_drawn() -> None:
    axis = scale("stepped", [8, 8], 0, 100)
    assert (axis.ticks, round(axis.at(8))) == ((8,), 50)


@pytest.mark.parametrize(
    ("value", "text"),
    [(2500, "2,500"), (0.25, "0.25"), (15000, "15,000"), (150000, "150k"), (0, "0"), (2.5, "2.5")],
)
def test_a_tick_is_short_to_read(value: float, text: str) -> None:
    assert tick_label(value) == text


@pytest.mark.parametrize("value", [-5.0, 0.0])
def test_the_end_of_an_interval_below_zero_is_drawn_at_the_end_of_the_axis(value: float) -> None:
    assert scale("log", [10, 1000], 200, 0).at(value) == 200
    assert scale("linear", [10, 1000], 200, 0).at(value) == 200
