"""A benchmark's numbers walked back: a changed file is named, a missing link is missing."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.attest.envelope import SUFFIX, enclose
from pipeline.artifacts.attest.keys import LocalSigner, PrivateKey, make_private_key
from pipeline.artifacts.attest.names import EVIDENCE_SET, HOST_FACTS, REPORT, predicate_kind
from pipeline.artifacts.attest.statement import make_statement
from pipeline.artifacts.oci.layout import export_layout
from pipeline.core.errors import EvidenceBroken, NumberChanged
from pipeline.core.model import canonical_json, sha256_of
from pipeline.evidence.statements.evidence_set import statements_folder
from pipeline.evidence.verify.chain import VerifyContext
from pipeline.evidence.verify.evidence import gather_envelopes
from pipeline.evidence.verify.runs import RunInputs, judge_bench_run
from pipeline.evidence.verify.verdict import Node, Verdict, how_to_add_facts, show, verdict_error
from pipeline.serving.bench.metrics import intervals, metrics_of
from pipeline.serving.bench.model import BenchRun, RequestRow
from pipeline.serving.bench.place import REQUESTS_FILE, RUN_FILE
from pipeline.serving.bench.record import (
    append_rows,
    read_request_rows,
    read_run,
    write_run,
)
from pipeline.serving.bench.results.recompute import benchmark_statement
from pipeline.serving.recipe import tiny
from tests.makers import AMD64
from tests.unit.bench.example_run import write_example
from tests.unit.verify.world import NOW, WHEN, World, trust_in, trusted

KEY = make_private_key()


@cache
def tiny_digest() -> str:
    """Half a second of arithmetic."""
    return sha256_of(tiny.tiny_gguf())


@pytest.fixture
def folder(tmp_path: Path, world: World) -> Path:
    """A signed run whose every input is known."""
    run = write_example(tmp_path / "run")
    facts = tmp_path / "facts.json"
    facts.write_text('{"host": "a"}')
    inputs = {"image": world.built.digest, "weights": tiny_digest()}
    inputs |= {"host": sha256_of(facts.read_bytes())}
    write_run(tmp_path / "run", _with_inputs(run, **inputs))
    _sign(tmp_path / "run")
    return tmp_path / "run"


def _with_inputs(run: BenchRun, **inputs: Any) -> BenchRun:
    return run.model_copy(update={"inputs": run.inputs.model_copy(update=inputs)})


def _sign(folder: Path, key: PrivateKey | None = KEY) -> None:
    statement = benchmark_statement(folder, WHEN)
    envelope = enclose(statement, [LocalSigner(key)] if key else [])
    (folder / f"{RUN_FILE}{SUFFIX}").write_bytes(envelope.dump())


def _judged(folder: Path, world: World, context: VerifyContext | None = None) -> Node:
    context = context or VerifyContext(
        trust_in(trusted(KEY, "bench"), trusted(world.key)), world.checkout, NOW
    )
    statements = sorted(folder.glob(f"*{SUFFIX}"))
    behind = RunInputs(world.store, [folder, folder.parent])
    run = judge_bench_run(folder, gather_envelopes(statements), context)
    return run.with_inputs(behind, context).node


def _find(node: Node, title: str) -> Node:
    """The first node whose title begins so."""
    found = [n for n in _all(node) if n.title.startswith(title)]
    assert found, show(node, everything=True)
    return found[0]


def _all(node: Node) -> list[Node]:
    return [node, *(each for child in node.children for each in _all(child))]


def _edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the result's file and leave all else as it is."""
    body = json.loads((folder / RUN_FILE).read_text())
    change(body)
    (folder / RUN_FILE).write_bytes(canonical_json(body) + b"\n")


def test_an_untouched_run_is_as_signed_and_its_numbers_follow(folder: Path, world: World) -> None:
    node = _judged(folder, world)
    assert _find(node, "benchmark-run").verdict is Verdict.VALID
    assert _find(node, "result").message == "every byte as signed"
    assert _find(node, "numbers").message == "the same again from 36 requests of 6 trials"
    assert _find(node, "workload example").verdict is Verdict.VALID


def test_an_image_is_followed_to_its_statements_wheels_and_patches(
    folder: Path, world: World
) -> None:
    image = _find(_judged(folder, world), "image engine")
    assert world.built.digest in image.title
    assert _find(_judged(folder, world), "weights").message.startswith("the tiny model")


def test_a_recipe_that_nobody_named_and_facts_without_a_statement_are_missing(
    folder: Path, world: World
) -> None:
    node = _judged(folder, world)
    assert _find(node, "recipe").verdict is Verdict.INCOMPLETE
    facts = _find(node, "host facts")
    assert facts.verdict is Verdict.INCOMPLETE
    assert "no evidence" in facts.message


def test_what_is_missing_of_a_host_s_facts_is_answered_with_the_command_that_adds_it(
    folder: Path, world: World
) -> None:
    path = folder.parent / "facts.json"
    attest = f"`sm120 host attest {path}` states the facts of the host."
    assert how_to_add_facts(_judged(folder, world)) == attest
    path.unlink()
    assert "name their folder with --look-in" in how_to_add_facts(_judged(folder, world))
    write_run(folder, _with_inputs(read_run(folder), host=None))
    assert "cannot be added to a finished run" in how_to_add_facts(_judged(folder, world))


@pytest.mark.parametrize("kind", [REPORT, EVIDENCE_SET])
def test_a_key_that_is_trusted_for_another_kind_does_not_vouch_for_facts(
    folder: Path, world: World, kind: str
) -> None:
    path, other = folder.parent / "facts.json", make_private_key()
    statement = make_statement("facts.json", sha256_of(path.read_bytes()), kind, {})
    path.with_name(f"{path.name}{SUFFIX}").write_bytes(
        enclose(statement, [LocalSigner(other)]).dump()
    )
    believed = trusted(other, "reporter", **{"for": [predicate_kind(kind)]})
    trust = trust_in(trusted(KEY, "bench"), trusted(world.key), believed)
    facts = _find(_judged(folder, world, VerifyContext(trust, world.checkout, NOW)), "host facts")
    assert facts.verdict is Verdict.BROKEN
    assert facts.culprit().message == (
        f"is a statement of the kind {predicate_kind(kind)}, not host-facts"
    )


def test_facts_that_are_stated_need_no_advice() -> None:
    stated = Node("host facts facts.json", children=(Node("host-facts"),))
    assert how_to_add_facts(Node("run", children=(stated,))) == ""
    unsigned = Node("host facts facts.json", children=(Node("host-facts", Verdict.UNSIGNED),))
    assert how_to_add_facts(Node("run", children=(unsigned,))) == ""


PLACES = [
    ("/cells/0/trials/0/metrics/energy_j", 1.0, "c1"),
    ("/cells/0/trials/1/metrics/ttft_ms/p99", 0.5, "c1"),
    ("/cells/0/trials/2/metrics/output_tok_s", 9999.0, "c1"),
    ("/cells/1/trials/0/metrics/failed", 1, "c2"),
    ("/cells/0/intervals/output_tok_s/mean", 5816.0, "c1"),
    ("/cells/0/intervals/tpot_ms.p50/high", 1.0, "c1"),
]
UNCOMPUTED = [
    ("/server/model", "another-model"),
    ("/self_tests/0/ttft_error", 0.0),
    ("/cells/0/trials/0/samples/gpus/0/power_w/1", 1.0),
    ("/cells/1/trials/1/void", []),
    ("/cells/0/trials/0/marks", []),
    ("/inputs/image", "sha256:" + "0" * 64),
    ("/started", "2026-11-02T08:00:01Z"),
]


def _put(place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: Any) -> None:
        *above, last = place.split("/")[1:]
        for part in above:
            body = body[int(part)] if isinstance(body, list) else body[part]
        body[int(last) if isinstance(body, list) else last] = value

    return change


@pytest.mark.parametrize(("place", "value", "cell"), PLACES)
def test_a_changed_number_is_named_with_what_follows_and_its_file_is_not_as_signed(
    place: str, value: Any, cell: str, folder: Path, world: World
) -> None:
    before = json.loads((folder / RUN_FILE).read_text())
    _edit(folder, _put(place, value))
    node = _judged(folder, world)
    assert node.verdict is Verdict.CHANGED
    error = verdict_error(node)
    assert isinstance(error, NumberChanged)
    assert error.exit_code == 77
    assert re.search(r"bench.json has sha256:\w+, which was not signed", str(error))
    assert before != json.loads((folder / RUN_FILE).read_text())
    again = _find(_find(node, "recomputed"), f"{place} (cell {cell})")
    assert re.search(r"is .*, by its requests and samples it is ", again.message)


def test_intervals_are_judged_by_sound_trials(folder: Path, world: World) -> None:
    _edit(folder, _put("/cells/0/trials/1/metrics/ttft_ms/p99", 0.5))
    places = [node.title for node in _find(_judged(folder, world), "recomputed").children]
    assert places == ["/cells/0/trials/1/metrics/ttft_ms/p99 (cell c1)"]


@pytest.mark.parametrize(("place", "value"), UNCOMPUTED)
def test_what_no_request_tells_is_still_as_signed_or_changed(
    place: str, value: Any, folder: Path, world: World
) -> None:
    _edit(folder, _put(place, value))
    node = _judged(folder, world)
    assert node.verdict is Verdict.CHANGED
    assert _find(node, "result").own is Verdict.CHANGED


def test_without_a_statement_the_requests_still_tell(folder: Path, world: World) -> None:
    (folder / f"{RUN_FILE}{SUFFIX}").unlink()
    assert _judged(folder, world).verdict is Verdict.INCOMPLETE
    _edit(folder, _put("/cells/0/trials/1/metrics/ttft_ms/p99", 0.5))
    node = _judged(folder, world)
    assert node.verdict is Verdict.CHANGED
    assert _find(node, "/cells/0/trials/1/metrics/ttft_ms/p99").message.startswith("is 0.5, by its")


def test_the_trial_of_a_changed_request_is_named(folder: Path, world: World) -> None:
    path = folder / REQUESTS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    lines[8] = lines[8].replace(b'"gaps_us":[1', b'"gaps_us":[2', 1)
    path.write_bytes(b"".join(lines))
    node = _judged(folder, world)
    assert node.verdict is Verdict.CHANGED
    # the ninth line is the third request of the second trial
    changed = _find(node, "/cells/0/trials/1/requests")
    assert re.search(r"the requests have sha256:\w+, the run names sha256:", changed.message)
    assert _find(_find(node, "recomputed"), "/cells/0/trials/1/metrics").own is Verdict.CHANGED


@pytest.mark.parametrize("how", ["shorter", "no request", "gone", "longer"])
def test_requests_that_are_cut_or_no_requests_never_pass(
    how: str, folder: Path, world: World
) -> None:
    path = folder / REQUESTS_FILE
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        new = {"shorter": data[:-300], "no request": b"x" * len(data), "longer": data + b"{}\n"}
        path.write_bytes(new[how])
    verdict = _judged(folder, world).verdict
    assert verdict is (Verdict.INCOMPLETE if how == "gone" else Verdict.CHANGED)


def test_a_statement_and_run_changed_together_are_not_believed(folder: Path, world: World) -> None:
    _edit(folder, _put("/server/model", "faster"))
    _sign(folder, make_private_key())
    node = _judged(folder, world)
    assert node.verdict is Verdict.BROKEN
    assert _find(node, "signature").own is Verdict.BROKEN
    _sign(folder, None)
    assert _find(_judged(folder, world), "signature").own is Verdict.UNSIGNED


def test_a_signed_statement_over_a_recomputed_lie_is_changed(folder: Path, world: World) -> None:
    """Who signs a number that does not follow from the requests has signed a lie."""
    _edit(folder, _put("/cells/0/trials/1/metrics/ttft_ms/p99", 0.5))
    _sign(folder)
    node = _judged(folder, world)
    assert _find(node, "benchmark-run").verdict is Verdict.VALID
    assert node.verdict is Verdict.CHANGED


def test_an_edited_envelope_is_broken(folder: Path, world: World) -> None:
    path = folder / f"{RUN_FILE}{SUFFIX}"
    body = json.loads(path.read_text())
    body["payload"] = body["payload"][:100] + "AAAA" + body["payload"][104:]
    path.write_text(json.dumps(body))
    assert _judged(folder, world).verdict is Verdict.BROKEN


def test_without_a_trust_file_nothing_is_valid(folder: Path, world: World) -> None:
    context = VerifyContext(None, world.checkout, NOW)
    assert _judged(folder, world, context).verdict is Verdict.INCOMPLETE


def test_the_same_values_in_other_bytes_are_noticed(folder: Path, world: World) -> None:
    body = json.loads((folder / RUN_FILE).read_text())
    (folder / RUN_FILE).write_text(json.dumps(body, indent=1))
    node = _judged(folder, world)
    assert node.verdict is Verdict.CHANGED
    assert "which was not signed" in _find(node, "result").message


def test_a_workload_that_is_not_the_one_it_names_is_changed(folder: Path, world: World) -> None:
    _edit(folder, _put("/workload/seed", 1))
    assert _find(_judged(folder, world), "workload").own is Verdict.CHANGED


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format": "sm120-bench/2"}', b"\xff"])
def test_what_is_no_result_is_broken(data: bytes, folder: Path, world: World) -> None:
    (folder / RUN_FILE).write_bytes(data)
    assert _judged(folder, world).verdict is Verdict.BROKEN


def test_an_image_that_is_not_here_is_missing(folder: Path, world: World) -> None:
    run = read_run(folder)
    write_run(folder, _with_inputs(run, image="sha256:" + "1" * 64, weights="sha256:" + "2" * 64))
    _sign(folder)
    node = _judged(folder, world)
    assert _find(node, "image").verdict is Verdict.INCOMPLETE
    assert "not in the store" in _find(node, "image").message
    assert "no lock here has the seal" in _find(node, "weights").message
    assert node.verdict is Verdict.INCOMPLETE


def test_an_image_is_found_behind_others_and_behind_a_damaged_record(
    folder: Path, world: World, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    shutil.copytree(world.store.root, root, symlinks=True)
    store = type(world.store)(root)
    (own,) = store.image_paths()
    for name, data in {
        "a": b"{}",
        "b": own.read_bytes().replace(world.built.digest.encode(), tiny_digest().encode()),
    }.items():
        path = root / "images" / name / "linux-amd64" / "image.json"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
    image = _find(_judged(folder, replace(world, store=store)), "image")
    assert image.title == f"image engine {AMD64} {world.built.digest}"
    assert image.part == "image"


@pytest.mark.parametrize(
    "inputs", [{"recipe": "sha256:" + "1" * 64}, {"recipe_name": "tiny"}, {"recipe": None}]
)
def test_half_of_what_names_a_recipe_names_none(
    folder: Path, world: World, inputs: dict[str, str | None]
) -> None:
    write_run(folder, _with_inputs(read_run(folder), **inputs))
    recipe = _find(_judged(folder, world), "recipe")
    assert (recipe.title, recipe.message) == ("recipe", "the run was not served from a recipe")


def _state_facts(path: Path) -> None:
    statement = make_statement(path.name, sha256_of(path.read_bytes()), HOST_FACTS, {})
    envelope = enclose(statement, [LocalSigner(KEY)])
    path.with_name(f"{path.name}{SUFFIX}").write_bytes(envelope.dump())


def test_facts_that_were_changed_under_their_statement_are_named(
    folder: Path, world: World
) -> None:
    path = folder.parent / "facts.json"
    was = sha256_of(path.read_bytes())
    _state_facts(path)
    path.write_text('{"host": "b"}')
    facts = _find(_judged(folder, world), "host facts")
    assert (facts.title, facts.verdict) == ("host facts facts.json", Verdict.CHANGED)
    assert facts.message == f"has {sha256_of(path.read_bytes())}, the run names {was}"
    path.unlink()  # then the statement is of nothing that is here
    missing = _find(_judged(folder, world), "host facts")
    assert missing.verdict is Verdict.INCOMPLETE
    assert missing.message == f"{was} is in none of the folders here (--look-in DIR)"


def test_facts_are_found_among_the_records_of_the_checkout(
    folder: Path, world: World, tmp_path: Path
) -> None:
    checkout = world.checkout_copy(tmp_path)
    records = checkout.root / "records"
    records.mkdir()
    shutil.move(folder.parent / "facts.json", records / "facts.json")
    context = VerifyContext(trust_in(trusted(KEY, "bench")), checkout, NOW)
    assert _find(_judged(folder, world, context), f"host facts {records / 'facts.json'}")
    missing = _find(_judged(folder, world, replace(context, checkout=None)), "host facts")
    assert "is in none of the folders here" in missing.message


def test_the_gates_of_an_image_that_is_not_published_may_wait(
    folder: Path, world: World, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    shutil.copytree(world.store.root, root, symlinks=True)
    store = type(world.store)(root)
    kept = statements_folder(store, world.built)
    kept.mkdir(parents=True)
    stated = {k: e for k, e in world.envelopes().items() if not k.startswith("gate-")}
    for name, envelope in world.with_set(stated).items():
        (kept / f"{name}{SUFFIX}").write_bytes(envelope.dump())
    image = _find(_judged(folder, replace(world, store=store)), "image engine")
    assert image.verdict is Verdict.VALID, show(image)
    waits = "not run yet: smem on sm_120, patches on sm_120 (`sm120 build engine --gate`)"
    assert _find(image, "gates").message == waits


def test_a_run_may_name_its_facts_by_their_statement(folder: Path, world: World) -> None:
    path = folder.parent / "facts.json"
    _state_facts(path)
    stated = path.with_name(f"{path.name}{SUFFIX}")
    write_run(folder, _with_inputs(read_run(folder), host=sha256_of(stated.read_bytes())))
    facts = _find(_judged(folder, world), "host facts")
    assert facts.title == f"host facts {path} {sha256_of(path.read_bytes())}"
    assert (facts.subject, facts.part) == (str(path), "host facts")
    path.unlink()
    facts = _find(_judged(folder, world), "host facts")
    assert facts.message == "the facts are not beside their statement"


@pytest.mark.parametrize(("files", "is_read"), [(4, True), (3, False)])
def test_a_folder_of_too_many_files_is_not_searched_for_facts(
    folder: Path, world: World, monkeypatch: pytest.MonkeyPatch, files: int, is_read: bool
) -> None:
    """The run and its statement, two files before the facts."""
    monkeypatch.setattr("pipeline.evidence.verify.runs._MOST_FILES", files)
    (folder.parent / "a.json").write_text("{}")
    if is_read:
        assert _find(_judged(folder, world), f"host facts {folder.parent / 'facts.json'}")
    else:
        with pytest.raises(EvidenceBroken, match=f"{folder.parent}: more than 3 files"):
            _judged(folder, world)


@pytest.mark.parametrize(("most", "is_read"), [(13, True), (12, False)])
def test_a_file_that_is_too_large_for_facts_is_not_read(
    folder: Path, world: World, monkeypatch: pytest.MonkeyPatch, most: int, is_read: bool
) -> None:
    assert (folder.parent / "facts.json").stat().st_size == 13
    monkeypatch.setattr("pipeline.evidence.verify.runs._MOST_FACTS_BYTES", most)
    facts = _find(_judged(folder, world), "host facts")
    assert facts.title.startswith(f"host facts {folder.parent / 'facts.json'}") is is_read
    assert ("is in none of the folders" in facts.message) is not is_read


def test_a_damaged_image_in_the_store_breaks_the_chain(
    folder: Path, world: World, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    shutil.copytree(world.store.root, root, symlinks=True)
    store = type(world.store)(root)
    layer = world.artifact.layers[0] if world.artifact.layers else ""
    path = store.blob_path(layer)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    damaged = replace(world, store=store)
    image = _find(_judged(folder, damaged), "image engine")
    assert image.verdict is Verdict.BROKEN


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_layout_beside_the_run_stands_in_for_the_store(
    folder: Path, world: World, tmp_path: Path, is_whole: bool
) -> None:
    layout = tmp_path / "layout"
    export_layout(world.store, world.built.record, layout)
    if not is_whole:
        (layout / "blobs" / "sha256" / (world.artifact.layers or ("",))[0][7:]).unlink()
    context = VerifyContext(
        trust_in(trusted(KEY, "bench"), trusted(world.key)), world.checkout, NOW
    )
    run = judge_bench_run(folder, [], context)
    walked = run.with_inputs(RunInputs(None, [layout]), context)
    image = _find(walked.node, "image layout")
    assert (image.verdict is Verdict.BROKEN) is not is_whole
    assert ("layer 1 of 4" in image.message) is not is_whole


def test_a_recipe_that_changed_since_is_stale(folder: Path, world: World, tmp_path: Path) -> None:
    recipes = Path(__file__).parents[3] / "recipes"
    name = sorted(path.stem for path in recipes.glob("*.yaml") if not path.stem.startswith("_"))[0]
    for path in recipes.glob("*.yaml"):
        shutil.copy(path, tmp_path / path.name)
    run = read_run(folder)
    write_run(folder, _with_inputs(run, recipe=sha256_of(b"old"), recipe_name=name))
    _sign(folder)
    recipe = _find(_judged(folder, world), "recipe")
    assert recipe.own is Verdict.STALE
    now = re.search(r"it is (sha256:\w+)", recipe.message)
    assert now
    write_run(folder, _with_inputs(run, recipe=now[1], recipe_name=name))
    assert _find(_judged(folder, world), "recipe").own is Verdict.VALID


def test_a_statement_of_another_kind_beside_a_run_is_broken(folder: Path, world: World) -> None:
    envelope = world.signed("provenance", KEY)
    (folder / f"{RUN_FILE}{SUFFIX}").write_bytes(envelope.dump())
    assert _find(_judged(folder, world), "provenance").verdict is Verdict.BROKEN


def _rewritten(folder: Path, run: BenchRun, rows: list[list[list[RequestRow]]]) -> None:
    """A run over chosen requests, all computed again: what a signer of a better number makes."""
    (folder / REQUESTS_FILE).unlink()
    cells, at = [], 0
    for cell, trials in zip(run.cells, rows, strict=True):
        own = []
        for trial, kept in zip(cell.trials, trials, strict=True):
            metrics = metrics_of(kept, run.workload.objectives, energy_j=207.5)
            lines = append_rows(folder, kept, at)
            at += lines.bytes
            own.append(trial.model_copy(update={"metrics": metrics, "requests": lines}))
        cells.append(cell.model_copy(update={"trials": own, "intervals": intervals(own)}))
    write_run(folder, run.model_copy(update={"cells": cells}))
    _sign(folder)


def _all_rows(folder: Path, run: BenchRun) -> list[list[list[RequestRow]]]:
    return [[list(read_request_rows(folder, t.requests)) for t in c.trials] for c in run.cells]


def test_a_run_that_was_computed_again_over_all_its_requests_is_valid(
    folder: Path, world: World
) -> None:
    run = read_run(folder)
    _rewritten(folder, run, _all_rows(folder, run))
    assert _find(_judged(folder, world), "numbers").verdict is Verdict.VALID


def test_the_slow_requests_of_a_trial_cannot_be_left_out(folder: Path, world: World) -> None:
    run = read_run(folder)
    rows = _all_rows(folder, run)
    rows[0][1].sort(key=lambda row: row.end_s or 0.0)
    rows[0][1].pop()
    _rewritten(folder, run, rows)
    node = _judged(folder, world)
    assert node.verdict is Verdict.CHANGED
    assert _find(node, "left out").message == "c1, trial 1: 5 of 6 requests"


def test_a_slow_trial_cannot_be_left_out(folder: Path, world: World) -> None:
    run = read_run(folder)
    first = run.cells[0]
    shorter = first.model_copy(
        update={"trials": first.trials[:2], "intervals": intervals(first.trials[:2])}
    )
    write_run(folder, run.model_copy(update={"cells": [shorter, run.cells[1]]}))
    _sign(folder)
    messages = [n.message for n in _all(_judged(folder, world)) if n.title == "left out"]
    assert "no trial names the bytes" in messages[0]
    assert "c1: 2 trials, the workload has 3" in messages


def test_a_good_trial_is_not_called_repeated(folder: Path, world: World) -> None:
    run = read_run(folder)
    first = run.cells[0]
    moved = {"trials": first.trials[:2], "intervals": intervals(first.trials[:2])}
    moved |= {"repeated": [first.trials[2].requests]}
    write_run(
        folder, run.model_copy(update={"cells": [first.model_copy(update=moved), run.cells[1]]})
    )
    _sign(folder)
    messages = [n.message for n in _all(_judged(folder, world)) if n.title == "left out"]
    assert "c1: a trial was left out, though none of its requests failed" in messages


def test_a_cell_cannot_be_left_out_or_called_good(folder: Path, world: World) -> None:
    run = read_run(folder)
    write_run(folder, run.model_copy(update={"cells": run.cells[:1]}))
    assert "1 cells, the workload has 2" in show(_judged(folder, world), everything=True)
    good = run.cells[1].model_copy(update={"state": "good"})
    write_run(folder, run.model_copy(update={"cells": [run.cells[0], good]}))
    assert "c2: is good, by its trials it is not" in show(_judged(folder, world), everything=True)


def test_a_sparse_file_of_requests_is_not_read(folder: Path, world: World) -> None:
    with (folder / REQUESTS_FILE).open("r+b") as file:
        file.truncate(50 << 30)
    node = _judged(folder, world)
    assert node.verdict is Verdict.BROKEN
    assert "has 53687091200 bytes" in node.message
