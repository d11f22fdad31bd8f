"""A whole tuning of a recipe, with an image, a gate and a card of the test's own making."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.app import tune
from pipeline.app.tune import TOKENS, TunedRecipe, TuneRequest, tune_recipe
from pipeline.artifacts.attest.envelope import SUFFIX, enclose
from pipeline.core.errors import RecordInvalid, StepFailed
from pipeline.serving.fit.facts import fact_of
from pipeline.serving.recipe.find import Recipes
from tests.unit.support import ROOT
from tests.unit.tune import paced_worker

NAME = "qwen38-flash-next-fp8-vllm-4x"
CARD = {
    **paced_worker.CARD,
    "power.limit": "600.00",
    "clocks.sm": "2400",
    "clocks.max.sm": "3090",
    "uuid": "GPU-1",
}
Hook = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]


class Machine:
    """What a test changes, and what was asked; `tune` is a run of the command."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.card: dict[str, str] = CARD
        self.hook: Hook = lambda request, answer: answer
        self.case: dict[str, Any] = {"name": "case"}
        self.about: dict[str, Any] = {}
        self.asked: list[dict[str, Any]] = []
        self.command: Sequence[str] = ()
        self.remove: Sequence[str] = ()

    def worker(self, command: Sequence[str], env: object, errors: object, remove: Any) -> Any:
        self.command, self.remove = command, remove
        return SimpleNamespace(ask=self.ask, stop=lambda: None, card={})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if "tokens" not in request:
            file = "E=1,N=2,device_name=Card.json"
            about = {"file": file, "torch": "2.11.0", "triton": "3.6.0", "card": self.card}
            return {**about, **self.about}
        self.asked.append(request)
        return self.hook(request, {**paced_worker.answer(request, {}), "card": self.card})

    def tune(self, *tokens: int, gpu: int = 0) -> TunedRecipe:
        self.asked.clear()
        request = TuneRequest(NAME, tokens=tokens or (16,), most=3, gpu=gpu)
        workspace: Any = SimpleNamespace(checkout=lambda: None, store=lambda: self.store)
        return tune_recipe(workspace, request, self.signing)

    store: Any
    signing: Any = SimpleNamespace(signers=(), state=lambda keys: "unsigned")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    (tmp_path / "tmp").mkdir()
    made = Machine(tmp_path)
    made.store = SimpleNamespace(
        root=tmp_path, in_use=nullcontext, locked=lambda name: nullcontext()
    )
    site = SimpleNamespace(venv=SimpleNamespace(site="opt/venv"))
    digest = f"sha256:{'1' * 64}"
    built = SimpleNamespace(name="vllm", platform="linux/amd64", digest=digest, plan=site)
    context = SimpleNamespace(store=made.store)
    target = SimpleNamespace(job=lambda cases: {"cases": [], "absent": [], "bare": []})
    gates = SimpleNamespace(cases=list)
    gate = SimpleNamespace(
        context=context, gates=gates, patched=lambda: None, target=lambda tree, card: target
    )
    model = fact_of("deepseek-ai/DeepSeek-V3.2")
    assert model

    def keep_all(store: object, built: object, statements: Any, *rest: object) -> None:
        for name, statement in statements.items():
            (tmp_path / f"{name}{SUFFIX}").write_bytes(enclose(statement).dump())

    engine = SimpleNamespace(kind="docker", load=lambda *of: None)
    doubles: dict[str, Any] = {
        "recipes_of": lambda *of: Recipes([ROOT / "recipes"]),
        "find_served_model": lambda *of: model.architecture(),
        "make_gate_context": lambda workspace: context,
        "find_image": lambda *of: built,
        "find_engine": lambda wanted: engine,
        "open_image_gate": lambda *of: gate,
        "case_for": lambda cases, shape: made.case,
        "find_case": lambda gates, name: None,
        "gate_judge": lambda *of: lambda configs: [*configs],
        "keep_all": keep_all,
        "statements_folder": lambda *of: tmp_path,
        "TrialWorker": made.worker,
    }
    for name, value in doubles.items():
        monkeypatch.setattr(tune, name, value)
    done = CompletedProcess([], 0, b"29.0.1", b"")
    monkeypatch.setattr("pipeline.core.proc.read", lambda *of, **how: done)
    return made


def test_a_table_has_every_size_and_those_not_asked_for_stay_the_engine_s_own(
    machine: Machine,
) -> None:
    table = machine.tune(512, 16, 16, 9000).table
    assert table
    assert [size.tokens for size in table.sizes] == [*TOKENS, 9000]
    tuned = [size.tokens for size in table.sizes if size.config != paced_worker.DEFAULT]
    assert tuned == [16, 512, 9000]


def test_a_later_run_for_one_size_loses_nothing_of_the_other_ones(machine: Machine) -> None:
    machine.tune(16)
    table = machine.tune(512).table
    assert table
    tuned = [size.tokens for size in table.sizes if size.config != paced_worker.DEFAULT]
    assert tuned == [16, 512]
    assert 16 not in {each["tokens"] for each in machine.asked}


@pytest.mark.parametrize("missing", ["name", "driver_version", "compute_cap"])
@pytest.mark.parametrize("value", ["", "[N/A]", None])
def test_a_card_that_nvidia_smi_does_not_name_is_not_tuned(
    machine: Machine, missing: str, value: str | None
) -> None:
    rest = {k: v for k, v in CARD.items() if k != missing}
    machine.card = rest if value is None else {**rest, missing: value}
    with pytest.raises(StepFailed, match=f"in its container lacks {missing} of card 0") as raised:
        machine.tune()
    assert "nvidia-ctk cdi generate" in raised.value.hint
    assert machine.asked == []


def test_without_nvidia_smi_nothing_is_tuned(machine: Machine) -> None:
    machine.card = {}
    with pytest.raises(StepFailed, match="lacks name, driver_version, compute_cap"):
        machine.tune()


@pytest.mark.parametrize(
    ("card", "why"),
    [
        ({**CARD, "name": "Other"}, "ran on Other 580.1 GPU-1, and the run began on Card 580.1"),
        ({**CARD, "driver_version": "590.1"}, "ran on Card 590.1 GPU-1"),
        ({**CARD, "uuid": "GPU-2"}, "ran on Card 580.1 GPU-2"),
        ({"name": "Card"}, "ran on Card"),
        ({}, "a card that nvidia-smi does not name"),
    ],
)
def test_a_trial_of_another_card_ends_the_run_and_is_not_kept(
    machine: Machine, card: dict[str, str], why: str
) -> None:
    def hook(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "card": card} if len(machine.asked) > 10 else answer

    machine.hook = hook
    with pytest.raises(StepFailed, match=why):
        machine.tune()
    (journal,) = (machine.root / "tuned").glob("*.jsonl")
    assert len(journal.read_text().splitlines()) == 10
    machine.hook = lambda request, answer: answer
    assert machine.tune().table


@pytest.mark.parametrize(
    "change",
    [
        {"card": {**CARD, "name": "Other"}},
        {"card": {**CARD, "driver_version": "590.1"}},
        {"card": {**CARD, "power.limit": "300.00"}},
        {"card": {**CARD, "clocks.max.sm": "2100"}},
        {"case": {"name": "case", "arguments": {}}},
    ],
)
def test_times_of_other_conditions_are_measured_anew(
    machine: Machine, change: dict[str, Any]
) -> None:
    machine.tune()
    count = len(machine.asked)
    machine.tune()
    assert machine.asked == []
    vars(machine).update(change)
    machine.tune()
    assert len(machine.asked) == count


def test_another_gate_worker_is_another_journal(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.tune()
    monkeypatch.setattr(tune, "program_digest", lambda folder: folder.name)
    machine.tune()
    count = len([*(machine.root / "tuned").iterdir()])
    other = machine.root / "other"
    monkeypatch.setattr(tune, "GATE_WORKER", other)
    machine.tune()
    assert len([*(machine.root / "tuned").iterdir()]) == count + 1


def test_no_gain_names_the_earlier_table_that_stays(machine: Machine) -> None:
    def slower(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        return {**answer, "tried_us": [2 * each for each in answer["default_us"]]}

    machine.hook = slower
    assert machine.tune().earlier is None
    machine.card = {**CARD, "driver_version": "590.1"}
    machine.hook = lambda request, answer: answer
    table = machine.tune().table
    machine.card = {**CARD, "driver_version": "600.1"}
    machine.hook = slower
    done = machine.tune()
    assert (done.table, done.earlier) == (None, table)


@pytest.mark.parametrize("own", [{"waves_per_eu": 0}, {"USE_TMA": False}])
def test_an_engine_s_own_sizes_may_be_zero_or_false(machine: Machine, own: dict[str, int]) -> None:
    machine.hook = lambda request, answer: {**answer, "default": {**answer["default"], **own}}
    table = machine.tune().table
    assert table
    assert own.items() <= table.sizes[0].config.items()


def test_what_no_table_can_hold_is_one_clear_line(machine: Machine) -> None:
    machine.about = {"file": "../../etc/passwd.json"}
    with pytest.raises(RecordInvalid, match=f"^the table for {NAME}: file: String should match"):
        machine.tune()


def test_a_number_that_a_card_has_not_is_none(machine: Machine) -> None:
    machine.card = {**CARD, "power.limit": "[N/A]", "clocks.sm": "[Unknown Error]"}
    table = machine.tune().table
    assert table
    assert (table.card.power_limit_w, table.card.clock_mhz) == (None, None)


def test_the_worker_counts_cards_as_nvidia_smi_does(machine: Machine) -> None:
    machine.tune(gpu=3)
    words = list(machine.command)
    assert words[words.index("CUDA_DEVICE_ORDER=PCI_BUS_ID") - 1] == "--env"
    assert "CUDA_VISIBLE_DEVICES=3" in words


def test_a_run_removes_the_container_of_a_killed_run_of_its_own_card_and_store(
    machine: Machine,
) -> None:
    machine.tune()
    first = list(machine.remove)
    assert first[:3] == ["docker", "rm", "--force"]
    command = list(machine.command)
    assert command[command.index("--name") + 1] == first[3]
    machine.tune()
    assert list(machine.remove) == first
    machine.tune(gpu=1)
    assert machine.remove[3] != first[3]
    machine.store.root = machine.root / "other"
    (machine.root / "other" / "tmp").mkdir(parents=True)
    machine.tune()
    assert machine.remove[3] != first[3]


def test_the_image_s_user_reads_the_job_whatever_our_umask(machine: Machine) -> None:
    modes: list[int] = []

    def hook(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        folder = next(w.removesuffix(":/job:ro") for w in machine.command if w.endswith(":/job:ro"))
        modes.extend(
            path.stat().st_mode & 0o777 for path in (Path(folder), Path(folder, "job.json"))
        )
        return answer

    machine.hook, before = hook, os.umask(0o077)
    try:
        machine.tune()
    finally:
        os.umask(before)
    assert modes[:2] == [0o755, 0o644]
