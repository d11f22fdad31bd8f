"""`sm120 gate run --dry-run`, over the cases of this checkout."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.artifacts.store.store import default_root
from tests.unit.support import AMD64, ARM64, ROOT, Command

RUN = ("--checkout", ROOT, "gate", "run")


@pytest.fixture(autouse=True)
def amd64(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that this runs on, whatever it is."""
    for module in ("workspace", "gate"):
        monkeypatch.setattr(f"pipeline.app.{module}.host_platform", lambda: AMD64)


def plan(sm120: Command, *words: str) -> Any:
    return sm120(*RUN, *words, "--dry-run", "--json").json


def test_a_dry_run_names_cases_cards_and_what_would_be_fetched(sm120: Command) -> None:
    planned = plan(sm120, "sglang-k2", "--platform", AMD64)
    assert [row["gate"] for row in planned["gates"]] == ["smem", "numerics", "arch"]
    assert {row["arch"] for row in planned["gates"]} == {"sm_120"}
    smem, _, arch = planned["gates"]
    assert "extend-mla-576-512" in smem["cases"]
    assert smem["note"] == "sglang 0.5.8.post1 with 1 patch"
    assert arch["note"] == "not judged: it is not built"
    # torch alone is more; the whole image is 5.3 GB
    assert 5e8 < planned["fetch_bytes"] < 3e9
    text = sm120(*RUN, "sglang-k2", "--dry-run").out
    assert f"sglang-k2 for {AMD64}: " in text
    assert " files to fetch, " in text


def test_a_dry_run_makes_no_store(sm120: Command) -> None:
    plan(sm120, "vllm", "--platform", AMD64)
    assert not default_root().exists()


def test_a_dry_run_is_of_what_was_chosen(sm120: Command) -> None:
    chosen = plan(sm120, "sglang-k2", "--unpatched", "--case", "extend-mla-*", "--only", "smem")
    (smem,) = chosen["gates"]
    assert all(name.startswith("extend-mla-") for name in smem["cases"])
    assert smem["note"] == "sglang 0.5.8.post1 unpatched"


def test_a_pattern_may_fit_cases_of_numerics_alone(sm120: Command) -> None:
    for words in ((), ("--only", "numerics")):
        (numerics,) = plan(sm120, "sglang-k2", "--case", "decode-gqa-cap*", *words)["gates"]
        assert (numerics["gate"], numerics["cases"]) == ("numerics", ["decode-gqa-cap-80"])
    assert sm120(*RUN, "sglang-k2", "--case", "decode-gqa-cap*", "--only", "smem").code == 10


def test_wheels_for_another_processor_are_not_known_before_an_index_is_asked(
    sm120: Command,
) -> None:
    assert plan(sm120, "vllm", "--platform", ARM64)["fetch_bytes"] is None
    text = sm120(*RUN, "vllm", "--platform", ARM64, "--dry-run").out
    assert "would be looked up in the index" in text


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("sglang-k2", "--case", "nope"), 10),
        (("sglang-k2", "--series", "nope"), 10),
        (("sglang-k2", "--arch", "sm_1"), 2),
        (("sglang-k2", "--discover"), 2),
        (("llama-cpp-cpu",), 10),
        (("nope",), 41),
    ],
)
def test_a_dry_run_refuses_what_a_run_refuses(
    sm120: Command, words: tuple[str, ...], code: int
) -> None:
    assert sm120(*RUN, *words, "--dry-run").code == code
