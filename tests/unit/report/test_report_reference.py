from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import SpecInvalid, UnknownReference
from pipeline.core.yaml_file import read_yaml
from pipeline.serving.bench.metrics import DEFINITIONS
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.report.build import all_references, fitting, named_reference
from pipeline.serving.report.model import Lengths, PublishedReference
from tests.unit.report.reports import as_data, sweep
from tests.unit.support import ROOT

# As the published report prints them: concurrency, output, total, peak, TTFT, TPOT.
K2_THINKING = [
    (128, 524, 1795, 1197, 1324, 160),
    (256, 867, 3039, 1937, 827, 207),
    (512, 1192, 4345, 3128, 1954, 401),
    (1024, 1610, 5655, 4941, 3560, 687),
    (2048, 1650, 5816, 3507, 12406, 576),
]
K2_5 = [
    (32, 171, 712, 323, 363, 96),
    (64, 214, 864, 357, 2026, 84),
    (128, 258, 884, 423, 8330, 85),
    (256, 267, 935, 449, 19010, 84),
    (500, 270, 985, 439, 38647, 88),
    (1000, 281, 985, 419, 85590, 91),
]
METRICS = ("output_tok_s", "total_tok_s", "peak_output_tok_s", "ttft_ms.mean", "tpot_ms.mean")


@pytest.mark.parametrize(("index", "rows"), [(0, K2_THINKING), (1, K2_5)])
def test_the_tables_are_those_of_the_document(index: int, rows: list[tuple[int, ...]]) -> None:
    series = named_reference("kimi-k2-sm120").series[index]
    got = [(c.concurrency, *(c.mean(name) for name in METRICS)) for c in series.cells]
    assert got == rows


def test_every_table_uses_metrics_that_have_a_definition() -> None:
    for reference in all_references():
        for cell in (c for series in reference.series for c in series.cells):
            for name in cell.numbers:
                assert name == "user_tok_s" or name.split(".")[0] in DEFINITIONS


def test_every_recipe_that_a_table_names_is_there() -> None:
    recipes = Recipes([ROOT / "recipes"])
    named = {s.recipe for reference in all_references() for s in reference.series if s.recipe}
    assert named
    for name in named:
        recipes.read(name)


def test_what_a_user_gets_is_computed_from_tpot() -> None:
    cell = named_reference("kimi-k26-b200").series[0].cells[0]
    assert cell.mean("user_tok_s") == round(1000 / 21.14, 6)


def test_no_document_has_evidence() -> None:
    for reference in all_references():
        assert {link.state for link in reference.evidence} == {"unknown"}


def test_a_name_that_is_not_there_is_an_error_with_the_list() -> None:
    with pytest.raises(UnknownReference, match="no reference tables named kimi-k3"):
        named_reference("kimi-k3")


HEAD = "name: a\ntitle: b\npublished: today\n"
TABLE = "series:\n- name: s\n  model: m\n  workload: w\n"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (TABLE + "  columns: [concurrency, speed]\n  rows: [[1, 2]]\n", "speed is no metric"),
        (TABLE + "  columns: [concurrency, output_tok_s]\n  rows: [[1]]\n", "1 values for 2"),
        (TABLE + "  columns: [concurrency, output_tok_s]\n  rows: [[0, 5]]\n", "concurrency"),
        ("claims:\n- {text: t, value: 1, unit: u, series: x}\n", "names no series"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, body: str, why: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(HEAD + body)
    with pytest.raises(SpecInvalid, match=why):
        read_yaml(path, PublishedReference)


def test_only_tables_of_the_same_lengths_or_recipe_stand_beside_a_run() -> None:
    run = as_data(sweep(1, 2))
    assert fitting([run]) == []
    kimi = run.series[0].model_copy(update={"lengths": Lengths(input=256, output=100)})
    same = run.model_copy(update={"series": [kimi]})
    assert [reference.name for reference in fitting([same])] == ["kimi-k2-sm120"]
