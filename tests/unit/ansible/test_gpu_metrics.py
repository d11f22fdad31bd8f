"""The program that writes the GPUs' numbers, and the dashboard that shows them."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.playbook import ROOT

FILES = ROOT / "ansible" / "roles" / "metrics" / "files"
PROGRAM = FILES / "sm120_gpu_metrics.py"
LOADED = runpy.run_path(str(PROGRAM))
# as a real H200 with driver 580.159.04 answered on 2026-11-18, but for its UUID
H200 = (
    "0, GPU-00000000-0000-0000-0000-000000000001, 00000000:00:06.0, NVIDIA H200, 580.159.04,"
    " 0x0000000000000001, 0, 0, 143771, 0, 91.72, 700.00, 700.00, 345, 3201, 1980, 3201, 34, 33,"
    " [N/A], 5, 16, 0, 0"
)
# a card that is held down and has no ECC
HELD = (
    '1, GPU-2, 00000000:C1:00.0, A "quoted" card, 595.58.03, 0x0000000000000044, 100, 71, 97887,'
    " 95000, 599.5, 600.00, 600.00, 2280, 13365, 3090, 14001, 88, N/A, 71, 5, 16, [N/A],"
    " [Not Supported]"
)
LOG = """NVRM: Xid (PCI:0000:c1:00): 31, pid=7
NVRM: Xid (PCI:0000:C1:00): 31, pid=8
NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus.
a program says NVRM: Xid (PCI:0000:c1:00): 48, and is no line of the driver's
"""
SAMPLE = re.compile(r'^([a-z][a-z0-9_]*)(\{(?:[a-z]+="(?:[^"\\\n]|\\.)*",?)+\})? (\S+)$')


def collected(folder: Path, smi: str, journal: str = "exit 1") -> dict[str, float]:
    """Every sample of the file that was written, by name and labels."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, body in (("nvidia-smi", smi), ("journalctl", journal)):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder / "out.prom")],
        env={"PATH": f"{folder}/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["bin", "out.prom"]
    samples, typed = {}, set()
    for line in (folder / "out.prom").read_text().splitlines():
        if line.startswith("# TYPE "):
            assert line.split()[2] not in typed
            typed.add(line.split()[2])
        elif not line.startswith("# HELP "):
            match = SAMPLE.match(line)
            assert match is not None, line
            assert match[1] in typed
            samples[match[1] + (match[2] or "")] = float(match[3])
    return samples


def answer(*rows: str) -> str:
    return "cat <<'END'\n" + "\n".join(rows) + "\nEND"


def test_the_numbers_are_in_base_units_and_what_a_card_lacks_is_left_out(tmp_path: Path) -> None:
    found = collected(tmp_path, answer(H200, HELD), answer(LOG))
    first, second = '{gpu="0",address="0000:00:06"}', '{gpu="1",address="0000:c1:00"}'
    assert found[f"sm120_gpu_memory_total_bytes{first}"] == 143771 * 2**20
    assert found[f"sm120_gpu_power_draw_watts{first}"] == 91.72
    assert found[f"sm120_gpu_sm_clock_max_hertz{first}"] == 1_980_000_000
    assert found[f"sm120_gpu_ecc_uncorrected_errors_total{first}"] == 0
    assert found[f"sm120_gpu_utilization_ratio{second}"] == 1
    assert f"sm120_gpu_fan_ratio{first}" not in found
    for name in ("memory_temperature_celsius", "ecc_corrected_errors_total"):
        assert f"sm120_gpu_{name}{second}" not in found
    held = {key: value for key, value in found.items() if "clocks_held" in key}
    by_heat = '{gpu="1",address="0000:c1:00",reason="hw_thermal_slowdown"}'
    assert held[f"sm120_gpu_clocks_held{by_heat}"] == 1
    # an idle card is not held
    assert sum(value for key, value in held.items() if 'gpu="0"' in key) == 0
    assert sum(held.values()) == 2
    assert found["sm120_gpu_collector_success"] == 1
    assert any('name="A \\"quoted\\" card"' in key for key in found)
    xids = {key: value for key, value in found.items() if "xids" in key}
    assert xids == {
        'sm120_gpu_xids_total{address="0000:c1:00",xid="31"}': 2,
        'sm120_gpu_xids_total{address="0000:c1:00",xid="79"}': 1,
    }


@pytest.mark.parametrize(
    "smi",
    [
        "echo 'NVIDIA-SMI has failed because it could not communicate with the driver.'; exit 9",
        "echo 'Field \"x\" is not a valid field to query.'; exit 2",
        answer("0, GPU-1, too few"),
        answer("No devices were found"),
    ],
)
def test_without_an_answer_there_are_no_old_numbers(tmp_path: Path, smi: str) -> None:
    collected(tmp_path, answer(H200))
    found = collected(tmp_path, smi, answer(LOG))
    assert found["sm120_gpu_collector_success"] == 0
    assert [key for key in found if "gpu=" in key] == []
    assert found['sm120_gpu_xids_total{address="0000:c1:00",xid="79"}'] == 1


def test_a_log_that_cannot_be_read_costs_the_xids_only(tmp_path: Path) -> None:
    found = collected(tmp_path, answer(H200), "echo 'No journal files' >&2; exit 1")
    assert found["sm120_gpu_collector_success"] == 1
    assert [key for key in found if "xids" in key] == []


# Metrics of others, each as its source names it. Counters of Python's client end in _total.
_VLLM = "vllm 0.32.0, vllm/v1/metrics/loggers.py"
_SGLANG = "sglang 0.5.23, srt/observability/metrics_collector.py; 0.5.8.post1, srt/metrics"
_NODE = "prometheus-node-exporter 1.5.0 of Debian 12, as it answered"
SOURCES = {
    "up": "Prometheus itself, for each target",
    **dict.fromkeys(
        (
            *("node_cpu_seconds_total", "node_memory_MemAvailable_bytes"),
            *("node_memory_MemTotal_bytes", "node_filesystem_avail_bytes"),
            *("node_filesystem_size_bytes", "node_network_receive_bytes_total"),
            *("node_network_transmit_bytes_total", "node_disk_read_bytes_total"),
            "node_uname_info",
        ),
        _NODE,
    ),
    **dict.fromkeys(
        (
            *("vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
            *("vllm:num_requests_running", "vllm:num_requests_waiting"),
            *("vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds_bucket"),
            *("vllm:inter_token_latency_seconds_bucket", "vllm:prefix_cache_hits_total"),
            *("vllm:e2e_request_latency_seconds_bucket", "vllm:prefix_cache_queries_total"),
        ),
        _VLLM,
    ),
    **dict.fromkeys(
        (
            *("sglang:generation_tokens_total", "sglang:prompt_tokens_total"),
            *("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
            *("sglang:cache_hit_rate", "sglang:time_to_first_token_seconds_bucket"),
            *("sglang:inter_token_latency_seconds_bucket",),
            *("sglang:e2e_request_latency_seconds_bucket",),
        ),
        _SGLANG,
    ),
}
WORDS = {
    *("sum", "avg", "count", "rate", "increase", "by", "or", "vector", "histogram_quantile"),
    "label_values",
}


def names_in(expression: str) -> set[str]:
    """The metrics of an expression: words that are no label, function or string."""
    bare = re.sub(r'"[^"]*"|\[[^]]*\]|\b(?:by) \([^)]*\)|\{[^}]*\}', " ", expression)
    bare = re.sub(r"label_values\((\w+), \w+\)", r"\1", bare)
    return {w for w in re.findall(r"[A-Za-z_][A-Za-z0-9_:]*", bare) if w not in WORDS}


def expressions(board: Any) -> list[str]:
    queries = [each["query"]["query"] for each in board["templating"]["list"] if "sort" in each]
    return queries + [t["expr"] for panel in board["panels"] for t in panel.get("targets", [])]


def unknown_names(board: Any) -> set[str]:
    ours = {name for name, _ in LOADED["NUMBERS"].values()} | set(LOADED["OTHERS"])
    return {name for each in expressions(board) for name in names_in(each)} - ours - set(SOURCES)


def test_every_metric_of_the_dashboard_is_written_by_us_or_has_a_source() -> None:
    board = json.loads((FILES / "dashboard.json").read_text())
    assert unknown_names(board) == set()
    used = {name for each in expressions(board) for name in names_in(each)}
    # and every source is of a metric that is shown
    assert set(SOURCES) <= used
    assert len(used) > 35


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ('rate(vllm:tokens_per_fortnight{instance=~"$host"}[5m])', "vllm:tokens_per_fortnight"),
        ("sum by (gpu) (sm120_gpu_happiness)", "sm120_gpu_happiness"),
        ("1 - node_memory_MemAvailable_byte", "node_memory_MemAvailable_byte"),
        ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_GPU_UTIL"),
    ],
)
def test_an_invented_metric_is_noticed(expression: str, name: str) -> None:
    board = json.loads((FILES / "dashboard.json").read_text())
    board["panels"][1]["targets"][0]["expr"] = expression
    assert unknown_names(board) == {name}


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    board = json.loads((FILES / "dashboard.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    identities = [panel["id"] for panel in board["panels"]]
    assert len(identities) == len(set(identities))
