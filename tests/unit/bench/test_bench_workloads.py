"""Workloads as people write them, and the requests that follow from them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.app.bench import changed_workload
from pipeline.core.errors import WorkloadInvalid
from pipeline.core.model import sha256_of
from pipeline.core.net.wire import Address
from pipeline.serving.bench.plan import (
    TokenScale,
    WorkerJob,
    arrivals,
    cells_of,
    draw,
    fit_scale,
    sessions,
    words,
)
from pipeline.serving.bench.workload import (
    Fixed,
    Normal,
    RandomTokens,
    Uniform,
    Workload,
    prompt_file,
    read_workload,
    shipped_names,
    workload_path,
)
from pipeline.serving.recipe.find import Recipes

_BASE: dict[str, Any] = {
    "name": "w",
    "summary": "A workload",
    "input": {"kind": "fixed", "tokens": 200},
    "output": {"kind": "fixed", "tokens": 50},
    "loads": [{"concurrency": 4, "requests": 8}],
}


def _workload(**changes: Any) -> Workload:
    return Workload.model_validate({**_BASE, **changes})


def _job(workload: Workload, **changes: Any) -> WorkerJob:
    cell = cells_of(workload)[0]
    base = {"address": Address.read("h:1"), "model": "m", "requests": cell.requests}
    return WorkerJob.model_validate({**base, "workload": workload, "cell": cell, **changes})


def _contents(job: WorkerJob) -> list[str]:
    bodies = [json.loads(session[0].body) for session in sessions(job)]
    return [body["messages"][-1]["content"] for body in bodies]


@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_workload_can_be_planned(name: str) -> None:
    workload = read_workload(name)
    cells = cells_of(workload)
    assert cells
    assert len({cell.name for cell in cells}) == len(cells)
    assert prompt_file(name, workload) is None


def test_the_shipped_sweeps_are_those_of_their_sources() -> None:
    def levels(name: str) -> list[int | None]:
        return [load.concurrency for load in read_workload(name).loads]

    assert levels("k2-thinking-256-100") == [128, 256, 512, 1024, 2048]
    assert levels("k25-int4-256-100") == [32, 64, 128, 256, 500, 1000]
    long = read_workload("long-8192-2048")
    assert (long.input, long.output) == (Fixed(tokens=8192), Fixed(tokens=2048))
    assert [(load.concurrency, load.requests) for load in long.loads] == [(32, 512)]
    assert read_workload("long-answer").output == Fixed(tokens=14707)
    talk = read_workload("conversation-16").prompts
    assert talk.kind == "conversation"
    assert len(talk.each_turn()) == 16


def test_every_workload_that_a_recipe_names_is_shipped() -> None:
    recipes = Recipes([Path(__file__).resolve().parents[3] / "recipes"])
    named = {name: recipes.read(name).bench for name in recipes.names()}
    assert {w for each in named.values() for w in each} <= set(shipped_names())
    assert named["kimi-k2-thinking-nvfp4-sglang-8x"] == ["k2-thinking-256-100"]


@pytest.mark.parametrize(
    "changes",
    [
        {"loads": []},
        {"starts": ["cold"]},
        {"input": None},
        {"output": None},
        {"loads": [{"requests": 5}]},
        {"loads": [{"concurrency": 0, "requests": 5}]},
        {"loads": [{"concurrency": 1, "requests": 0}]},
        {"loads": [{"rate_per_s": 0, "requests": 5}]},
        {"input": {"kind": "uniform", "least": 9, "most": 8}},
        {"input": {"kind": "normal", "mean": 5, "deviation": 1, "least": 6, "most": 9}},
        {"prompts": {"kind": "conversation", "turns": []}},
        {"prompts": {"kind": "file", "path": "../secrets"}},
        {"repeats": 0},
        {"extra": 1},
    ],
)
def test_a_workload_that_says_too_little_or_nonsense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        _workload(**changes)


def test_an_unknown_workload_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(WorkloadInvalid, match="quick") as caught:
        workload_path("nothing")
    assert "Did you mean" not in caught.value.hint
    with pytest.raises(WorkloadInvalid) as caught:
        workload_path("qick")
    assert caught.value.hint.startswith("Did you mean quick? ")
    with pytest.raises(WorkloadInvalid, match="cannot be read"):
        read_workload(str(tmp_path / "none.yaml"))


def test_a_misspelt_key_of_a_workload_is_answered_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps({**_BASE, "loads": [{"concurency": 4, "requests": 8}]}))
    with pytest.raises(WorkloadInvalid, match=r"loads\.0\.concurency: .*mean `concurrency`\?"):
        read_workload(str(path))


@pytest.mark.parametrize("text", ["", "- a\n", "a word\n", "5\n"])
def test_a_workload_that_is_no_mapping_is_told_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(WorkloadInvalid, match="the file: is not a mapping"):
        read_workload(str(path))


def test_workers_share_the_same_requests() -> None:
    workload = _workload()
    alone = _contents(_job(workload))
    first, second = (_contents(_job(workload, worker=n, workers=2)) for n in range(2))
    assert alone[0::2] == first
    assert alone[1::2] == second


def test_streams_are_shared_and_none_is_lost() -> None:
    workload = _workload(loads=[{"concurrency": 5, "requests": 9}])
    assert [_job(workload, worker=n, workers=3).streams for n in range(3)] == [2, 2, 1]
    assert _job(_workload(loads=[{"concurrency": 50, "requests": 3}])).streams == 3


def test_prompts_differ_by_number_trial_phase_and_run() -> None:
    workload = _workload()
    texts = [
        *_contents(_job(workload)),
        *_contents(_job(workload, trial=1)),
        *_contents(_job(workload, phase="warm-up")),
        *_contents(_job(workload, nonce="another")),
    ]
    assert len({text[:14] for text in texts}) == len(texts) == 32


def test_identical_prompts_have_to_be_asked_for() -> None:
    workload = _workload(prompts={"kind": "text", "unique": False})
    assert len(set(_contents(_job(workload)))) == 1


def test_a_shared_prefix_is_shared_by_its_group_alone() -> None:
    prompts = {"kind": "text", "prefix_tokens": 100, "prefix_groups": 2}
    texts = _contents(_job(_workload(prompts=prompts)))
    heads = [text.partition("[")[0] for text in texts]
    assert heads[0] == heads[2] != heads[1] == heads[3]
    assert len(heads[0].split()) == round(100 / TokenScale().per_word)
    assert len(set(texts)) == 8


def test_lengths_are_within_their_bounds_and_near_their_mean() -> None:
    uniform = Uniform(kind="uniform", least=10, most=20)
    drawn = [draw(uniform, str(n)) for n in range(500)]
    assert (min(drawn), max(drawn)) == (10, 20)
    normal = Normal(kind="normal", mean=100, deviation=50, least=40, most=150)
    drawn = [draw(normal, str(n)) for n in range(500)]
    assert (min(drawn), max(drawn)) == (40, 150)
    assert fmean(drawn) == pytest.approx(100, rel=0.05)
    assert draw(Fixed(tokens=7), "any") == 7


def test_poisson_arrivals_have_the_rate_and_the_spread() -> None:
    due = arrivals(10, 5000, "poisson", "key")
    gaps = [b - a for a, b in zip([0.0, *due], due, strict=False)]
    assert fmean(gaps) == pytest.approx(0.1, rel=0.05)
    # of an exponential distribution the deviation is the mean
    assert fmean([(gap - 0.1) ** 2 for gap in gaps]) ** 0.5 == pytest.approx(0.1, rel=0.1)
    assert due == arrivals(10, 5000, "poisson", "key") != arrivals(10, 5000, "poisson", "other")
    assert arrivals(2, 3, "even", "key") == [0.0, 0.5, 1.0]


def test_random_tokens_go_to_completions_as_ids() -> None:
    prompts = {"kind": "random-tokens", "vocabulary": 3000}
    workload = _workload(prompts=prompts)
    assert isinstance(workload.prompts, RandomTokens)
    (first, *_), *_ = sessions(_job(workload))
    ids = json.loads(first.body)["prompt"]
    assert len(ids) == 200
    assert min(ids) >= 1000
    assert max(ids) < 3000


def test_a_prompt_file_is_read_and_never_used_twice(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"Tell me of {n}."}) for n in range(8)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    prompts = {"kind": "file", "path": "prompts.jsonl", "digest": sha256_of(path.read_bytes())}
    workload = _workload(prompts=prompts, input=None)
    assert _contents(_job(workload, prompt_file=str(path)))[2] == "Tell me of 2."
    with pytest.raises(WorkloadInvalid, match="9 are needed"):
        list(sessions(_job(workload, requests=9, prompt_file=str(path))))
    path.write_text("\n".join(reversed(lines)), encoding="utf-8")
    with pytest.raises(WorkloadInvalid, match="the workload names"):
        list(sessions(_job(workload, prompt_file=str(path))))


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"prompt": 5}', '{"messages": [5]}', "NaN"])
def test_a_line_that_is_no_prompt_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    workload = _workload(prompts={"kind": "file", "path": path.name})
    with pytest.raises(WorkloadInvalid, match="line 2"):
        list(sessions(_job(workload, prompt_file=str(path))))


def test_a_scale_is_fitted_and_a_mad_one_refused() -> None:
    scale = fit_scale((40, 82), (440, 602))
    assert scale.words(342) == 240
    for few, many in ((0, 0), (10, 10), (100, 50)):
        with pytest.raises(WorkloadInvalid, match="counts"):
            fit_scale((40, few), (440, many))


def test_words_are_as_many_as_asked_and_always_the_same() -> None:
    assert len(words("key", 1000).split()) == 1000
    assert words("key", 50) == words("key", 50) != words("other", 50)


def test_another_nonce_orders_the_same_words_otherwise() -> None:
    one, other = (words("key", 60, nonce) for nonce in ("one", "other"))
    assert one != other
    assert sorted(one.split()) == sorted(other.split())


def test_what_was_typed_takes_the_place_of_the_workloads_own() -> None:
    typed = changed_workload(
        _workload(), concurrency=[1, 2], input_tokens=9, repeats=5, allow_loops=True
    )
    assert [(load.concurrency, load.requests) for load in typed.loads] == [(1, 4), (2, 8)]
    assert (typed.input, typed.repeats, typed.looping) == (Fixed(tokens=9), 5, "mark")
    assert [load.rate_per_s for load in changed_workload(_workload(), rate=[0.5]).loads] == [0.5]
    assert changed_workload(_workload()) == _workload()
    with pytest.raises(WorkloadInvalid):
        changed_workload(_workload(), concurrency=[1], rate=[1.0])
    with pytest.raises(WorkloadInvalid):
        changed_workload(read_workload("speed-alone"), input_tokens=5)


def test_cells_have_names_of_their_own() -> None:
    names = [cell.name for cell in cells_of(read_workload("speed-alone"))]
    assert names == ["c1-in512", "c1-in2048", "c1-in8192", "c1-in16384"]
    twice = _workload(loads=[{"concurrency": 2, "requests": 4}] * 2)
    assert [cell.name for cell in cells_of(twice)] == ["c2", "c2-1"]


_READS = {"input": {"kind": "fixed", "tokens": 900}}


def test_reads_come_first_and_writers_have_no_end() -> None:
    workload = _workload(loads=[{"concurrency": 2, "requests": 2, "reads": _READS}])
    cell = cells_of(workload)[0]
    assert cell.name == "c2-read900"
    planned = [session[0] for session, _ in zip(sessions(_job(workload)), range(20), strict=False)]
    assert [each.part for each in planned] == ["reader"] * 3 + ["writer"] * 17
    assert [each.asked_input for each in planned[:4]] == [900, 900, 900, 200]
    assert [each.asked_output for each in planned[:4]] == [1, 1, 1, 50]
    # one read warms up, and then there is an end
    warm = list(sessions(_job(workload, phase="warm-up")))
    assert [session[0].part for session in warm] == ["reader", "writer", "writer"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loads": [{"rate_per_s": 2, "requests": 2, "reads": _READS}]}, "need writers"),
        ({"loads": [{"concurrency": 4, "requests": 2, "reads": _READS}]}, "need writers"),
        (
            {
                "loads": [{"concurrency": 2, "requests": 2, "reads": _READS}],
                "prompts": {"kind": "random-tokens", "vocabulary": 100},
            },
            "are of text",
        ),
        ({"loads": [{"concurrency": 2, "requests": 2, "reads": {"times": 0}}]}, "times"),
    ],
)
def test_reads_that_cannot_be_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        _workload(**changes)


def test_a_reader_stays_beside_another_number_of_writers() -> None:
    changed = changed_workload(read_workload("interference"), concurrency=[8])
    assert [(load.concurrency, load.requests) for load in changed.loads] == [(8, 8)]
    assert changed.loads[0].reads == read_workload("interference").loads[0].reads


def test_a_workload_without_reads_has_the_digest_that_it_had() -> None:
    assert "reads" not in _workload().model_dump(mode="json")["loads"][0]
    assert "reads" not in cells_of(_workload())[0].model_dump(mode="json")
