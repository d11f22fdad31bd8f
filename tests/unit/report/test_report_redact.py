from __future__ import annotations

import pytest

from pipeline.serving.report.build import report_data
from pipeline.serving.report.from_host import with_host
from pipeline.serving.report.redact import Redactor, redact_report
from tests.unit.hosts.machines import facts
from tests.unit.report.reports import MADE, as_data, of_example, published, sweep


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("http://gpu1.corp.example:8000/v1", "gpu1.corp.example"),
        ("http://alice:hunter2@gpu1:8000", "hunter2"),
        ("listening on 10.1.2.3 port 80", "10.1.2.3"),
        ("peer fe80::1ff:fe23:4567:890a lost", "fe80::1ff"),
        ("peer 2001:db8:0:1:2:3:4:5", "2001:db8"),
        ("--model /home/alice/models/k2", "alice"),
        ("log in ~/runs/night/engine.log", "night"),
        ("/mnt/customer-x/weights: missing", "customer-x"),
        ("serial: 1652924012345", "1652924012345"),
        ("GPU-3f0c1f3e-7a52-4b6e-9f0e-1c2d3e4f5a6b fell off", "3f0c1f3e"),
        ("eth0 0a:1b:2c:3d:4e:5f up", "0a:1b:2c"),
        ("mail alice@corp.example", "alice@"),
        ("started on rack7-node3 by bob", "rack7-node3"),
        ("started on rack7-node3 by bob", "bob"),
    ],
)
def test_what_identifies_somebody_is_left_out(text: str, secret: str) -> None:
    assert secret not in Redactor(["rack7-node3", "bob"]).text(text)


@pytest.mark.parametrize(
    "text",
    [
        "moonshotai/Kimi-K2.5",
        "vllm 0.32.0, torch 2.13.0",
        "http://127.0.0.1:8000",
        "8192/2048 tokens, 32 parallel",
        "1,650 tok/s output at 2026-11-16T12:00:00Z",
        "sha256:" + "a" * 64,
        "generation 5 x16",
        "a bobsled",
    ],
)
def test_facts_about_the_measurement_stay(text: str) -> None:
    assert Redactor(["bob"]).text(text) == text


def test_the_same_value_has_the_same_placeholder_everywhere() -> None:
    redactor = Redactor()
    first, again = redactor.text("at 10.0.0.1"), redactor.text("10.0.0.1 and 10.0.0.2")
    assert first.removeprefix("at ") == again.partition(" ")[0]
    assert len(set(again.split(" and "))) == 2


def test_numbers_and_digests_of_a_run_stay() -> None:
    data = of_example()
    clean = redact_report(data)
    assert clean.redacted
    assert clean.runs[0].digest == data.runs[0].digest
    assert [s.cells for s in clean.runs[0].series] == [s.cells for s in data.runs[0].series]


def test_the_folder_of_a_run_is_left_out() -> None:
    run = as_data(sweep(1)).model_copy(update={"file": "customer-x-night/bench.json"})
    clean = redact_report(report_data([run, run], [], [], made=MADE))
    assert "customer-x" not in clean.model_dump_json()


def test_published_documents_stay_word_for_word() -> None:
    data = published("kimi-k2-sm120")
    assert redact_report(data).references == data.references


def test_the_name_of_the_host_is_left_out_wherever_it_stands() -> None:
    named = facts().model_copy(update={"host": "rack7-node3"})
    run = with_host(as_data(sweep(1)), named).model_copy(update={"title": "night on rack7-node3"})
    clean = redact_report(report_data([run], [], [], made=MADE))
    assert "rack7" not in clean.model_dump_json()
