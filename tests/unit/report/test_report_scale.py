from __future__ import annotations

import pytest

from pipeline.serving.report.chart import linear, logarithmic, stepped, tick_label


def test_a_linear_axis_starts_at_zero_and_ends_at_a_round_number() -> None:
    scale = linear([524, 1650], 0, 100)
    assert scale.ticks == (0, 500, 1000, 1500, 2000)
    assert (scale.at(0), scale.at(2000)) == (0, 100)


def test_small_values_have_ticks_without_rounding_errors() -> None:
    assert linear([0.29], 0, 1).ticks == (0, 0.1, 0.2, 0.3)


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0]])
def test_an_axis_without_a_value_above_zero_can_be_drawn(values: list[float]) -> None:
    scale = linear(values, 0, 100)
    assert scale.ticks[0] == 0
    assert scale.at(0) == 0


def test_a_value_equal_to_a_tick_does_not_add_another() -> None:
    assert linear([1000], 0, 1).ticks[-1] == 1000


def test_each_decade_of_a_log_axis_is_as_wide_as_the_others() -> None:
    scale = logarithmic([1, 1000], 0, 300)
    assert [round(scale.at(v)) for v in (1, 10, 100, 1000)] == [0, 100, 200, 300]


def test_a_log_axis_of_few_decades_has_ticks_between_them() -> None:
    assert logarithmic([300, 9000], 0, 1).ticks == (200, 500, 1000, 2000, 5000, 10000)


def test_a_single_value_on_a_log_axis_stands_inside() -> None:
    scale = logarithmic([50], 0, 100)
    assert 0 < scale.at(50) < 100


def test_ticks_of_a_sweep_are_its_loads() -> None:
    assert stepped([32, 64, 128], 0, 400, gap=38).ticks == (32, 64, 128)


def test_loads_that_lie_too_near_leave_their_tick_to_the_larger() -> None:
    assert stepped([500, 512, 1000, 1024], 0, 400, gap=38).ticks == (512, 1024)


def test_a_sweep_of_one_load_can_be_drawn() -> None:
    scale = stepped([8, 8], 0, 100, gap=38)
    assert (scale.ticks, round(scale.at(8))) == ((8,), 50)


@pytest.mark.parametrize(
    ("value", "text"),
    [(2500, "2,500"), (0.25, "0.25"), (15000, "15,000"), (150000, "150k"), (0, "0"), (2.5, "2.5")],
)
def test_a_tick_is_short_to_read(value: float, text: str) -> None:
    assert tick_label(value) == text


@pytest.mark.parametrize("value", [-5.0, 0.0])
def test_the_end_of_an_interval_below_zero_is_drawn_at_the_end_of_the_axis(value: float) -> None:
    assert logarithmic([10, 1000], 200, 0).at(value) == 200
    assert linear([10, 1000], 200, 0).at(value) == 200
