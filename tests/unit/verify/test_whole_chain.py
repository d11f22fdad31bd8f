"""A number walked back to host, image, patch, wheel and weight file; and one break of each kind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeline.artifacts.attest.envelope import SUFFIX, enclose
from pipeline.artifacts.attest.keys import LocalSigner, make_private_key
from pipeline.artifacts.attest.names import HOST_FACTS
from pipeline.artifacts.attest.statement import make_statement
from pipeline.artifacts.store.store import Store
from pipeline.core.model import sha256_of
from pipeline.evidence.statements.evidence_set import evidence_folder
from pipeline.evidence.verify.chain import VerifyContext
from pipeline.evidence.verify.evidence import beside, gather_envelopes
from pipeline.evidence.verify.runs import RunInputs, judge_report
from pipeline.evidence.verify.verdict import Node, Verdict, show, verdict_error
from pipeline.hosts.facts.summary import summarise
from pipeline.serving.bench.place import RUN_FILE
from pipeline.serving.bench.record import write_run
from pipeline.serving.bench.results.recompute import benchmark_statement
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.report.build import report_data
from pipeline.serving.report.from_run import read_run_data
from pipeline.serving.report.page import render_page, report_statement
from pipeline.serving.serve.run import recipe_digest
from pipeline.weights.sign import signing
from tests.makers import AMD64
from tests.testbed.locked_set import SMALL, make_set
from tests.unit.bench.example_run import write_example
from tests.unit.hosts.machines import blackwell, facts
from tests.unit.verify.world import NOW, WHEN, World, trust_in, trusted

RECIPES = Path(__file__).parents[3] / "recipes"
RECIPE = "kimi-k26-vllm-8x"
KEY = make_private_key()


@dataclass(frozen=True)
class Story:
    """Everything from the host to the report, in one folder."""

    folder: Path
    store: Store
    world: World

    @property
    def page(self) -> Path:
        return self.folder / "report.html"

    def judged(self) -> Node:
        trust = trust_in(trusted(KEY, "bench"), trusted(self.world.key))
        context = VerifyContext(trust, self.world.checkout, NOW, deep=True)
        places = [self.folder / name for name in ("weights", "records", "recipes")]
        items = gather_envelopes(beside(self.page))
        return judge_report(self.page, items, context, RunInputs(self.store, places)).node


@pytest.fixture
def story(tmp_path: Path, world: World) -> Story:
    signer = LocalSigner(KEY)
    store = _store(tmp_path, world)
    place = make_set(tmp_path / "weights", SMALL, {"model.safetensors": b"weights" * 1000})
    signing.sign_folder(place, KEY, signing.default_signature(place))
    host = tmp_path / "records" / "node1.json"
    host.parent.mkdir()
    found = facts(blackwell(2))
    host.write_text(found.model_dump_json())
    digest = sha256_of(host.read_bytes())
    body = summarise(found).model_dump(mode="json")
    stated = enclose(make_statement(host.name, digest, HOST_FACTS, body, WHEN), [signer])
    host.with_name(f"{host.name}{SUFFIX}").write_bytes(stated.dump())
    shutil.copytree(RECIPES, tmp_path / "recipes")
    run = write_example(tmp_path / "run")
    inputs = {
        "image": world.built.digest,
        "weights": place.lock.seal,
        "recipe": recipe_digest(Recipes([RECIPES]).read(RECIPE)),
        "recipe_name": RECIPE,
        "host": digest,
    }
    write_run(
        tmp_path / "run",
        run.model_copy(update={"inputs": run.inputs.model_copy(update=inputs)}),
    )
    envelope = enclose(benchmark_statement(tmp_path / "run", WHEN), [signer])
    (tmp_path / "run" / f"{RUN_FILE}{SUFFIX}").write_bytes(envelope.dump())
    data = report_data([read_run_data(tmp_path / "run")], [], [], made=WHEN.at, title=None)
    page = render_page(data)
    (tmp_path / "report.html").write_bytes(page)
    signed = enclose(report_statement("report.html", page, data, WHEN), [signer])
    (tmp_path / f"report.html{SUFFIX}").write_bytes(signed.dump())
    return Story(tmp_path, store, world)


def _store(folder: Path, world: World) -> Store:
    """The world's store, with the signed evidence of its image."""
    shutil.copytree(world.store.root, folder / "store", symlinks=True)
    store = Store(folder / "store")
    evidence = evidence_folder(store, "engine", AMD64, world.built.digest)
    evidence.mkdir(parents=True, exist_ok=True)
    for name, envelope in world.envelopes().items():
        (evidence / f"{name}{SUFFIX}").write_bytes(envelope.dump())
    return store


def _all(node: Node) -> list[Node]:
    return [node, *(each for child in node.children for each in _all(child))]


def test_a_number_is_walked_to_host_image_patch_wheel_and_weight_file(story: Story) -> None:
    node = story.judged()
    text = show(node, everything=True)
    assert node.verdict is Verdict.VALID, text
    assert verdict_error(node) is None
    titles = "\n".join(each.title for each in _all(node))
    named = ("image engine linux/amd64", "weights tiny", f"recipe {RECIPE}", "host facts")
    for title in (*named, "workload example", "client", "numbers of the report", "files"):
        assert title in titles, text
    assert "pkg" in titles
    assert "patches/0001.patch" in text


def _edited(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.chmod(0o644)
    path.write_bytes(data.replace(old, new, 1))


def _weight_byte(story: Story) -> None:
    _edited(story.folder / "weights" / "model.safetensors", b"weights", b"Weights")


def _host_setting(story: Story) -> None:
    _edited(story.folder / "records" / "node1.json", b'"version":1', b'"version":2')


def _recipe(story: Story) -> None:
    path = story.folder / "recipes" / f"{RECIPE}.yaml"
    path.write_text(f"{path.read_text()}\nbench: [tiny]\n")


def _layer(story: Story) -> None:
    layers = story.world.artifact.layers
    assert layers
    path = story.store.blob_path(layers[-1])
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def _image_gone(story: Story) -> None:
    for path in story.store.image_paths():
        path.unlink()


def _number(story: Story) -> None:
    _edited(story.page, b'"completed":{"high":6', b'"completed":{"high":7')


def _request(story: Story) -> None:
    _edited(story.folder / "run" / "requests.jsonl", b'"chunks":8', b'"chunks":9')


def _unsigned(story: Story) -> None:
    envelope = enclose(benchmark_statement(story.folder / "run", WHEN))
    (story.folder / "run" / f"{RUN_FILE}{SUFFIX}").write_bytes(envelope.dump())


@pytest.mark.parametrize(
    ("change", "verdict", "where"),
    [
        (_weight_byte, Verdict.BROKEN, "weights tiny"),
        (_host_setting, Verdict.CHANGED, "host facts"),
        (_recipe, Verdict.STALE, f"recipe {RECIPE}"),
        (_layer, Verdict.BROKEN, "image engine linux/amd64"),
        (_image_gone, Verdict.INCOMPLETE, "image"),
        (_number, Verdict.CHANGED, "report ("),
        (_request, Verdict.CHANGED, "numbers"),
        (_unsigned, Verdict.UNSIGNED, "benchmark-run ("),
    ],
)
def test_one_break_of_each_kind_is_noticed_where_it_is(
    change: Callable[[Story], None], verdict: Verdict, where: str, story: Story
) -> None:
    change(story)
    node = story.judged()
    assert node.verdict is verdict, show(node)
    wrong = [n.title for n in _all(node) if n.verdict is verdict]
    assert any(title.startswith(where) for title in wrong), wrong
