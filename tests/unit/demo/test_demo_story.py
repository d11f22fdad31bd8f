"""The demo's overview, folder and commands, and the breaks that need no machine of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeline.serving.recipe.find import Recipes
from tests import makers
from tests.demo import __main__ as demo
from tests.demo import breaks, story, world
from tests.demo.checkout import IMAGE, PATCH, RECIPE, write_checkout, write_recipe
from tests.demo.overview import LeftOut, Noticed, Overview, StepRecord
from tests.demo.shell import Ended, Shell, StepFailed
from tests.demo.world import PUBLISH, WEIGHTS_STAGE, World, make_empty, new_world
from tests.testbed.packages import CannotHave
from tests.unit.bench.example_run import FOLDER
from tests.unit.support import Command


class NearShell(Shell):
    """The command in this process."""

    command: Command

    def _run(self, command: list[str], env: object) -> tuple[int, str, str]:
        ended = self.command(*command[command.index("pipeline") + 1 :])
        return ended.code, ended.out, ended.err


@pytest.fixture
def here(sm120: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with ExitStack() as stack:
        found = new_world(sm120.cwd / "demo", stack, Overview([*story.STORY, "a test"]))
        found.shell.__class__ = NearShell
        assert isinstance(found.shell, NearShell)
        found.shell.command = Command(sm120._capfd, monkeypatch, found.checkout)
        yield found


def test_what_a_machine_cannot_have_is_left_out_with_its_reason_and_the_next_step_runs(
    here: World, capfd: pytest.CaptureFixture[str]
) -> None:
    def nodes(_: World) -> str:
        raise CannotHave("A private Docker daemon needs root.")

    for step in (nodes, story.verify, lambda _: "made"):
        demo.run_step(here, step)
    states = [(record.state, record.result) for record in here.overview.records]
    assert states == [
        ("left out", "A private Docker daemon needs root."),
        ("left out", "needs what `report` makes"),
        ("done", "made"),
    ]
    said = capfd.readouterr().err
    assert "(next: A plan: weights, an image, a registry)" in said
    assert "left out: A private Docker daemon needs root." in said


@pytest.mark.parametrize("error", [ValueError("odd"), StepFailed("`sm120 x` ended with 3")])
def test_a_step_that_fails_ends_the_story_and_says_why(here: World, error: Exception) -> None:
    def fail(_: World) -> str:
        raise error

    with pytest.raises(StepFailed, match=str(error)):
        demo.run_step(here, fail)
    assert here.overview.records[0].state == "failed"
    assert str(error) in here.overview.tables()


def test_all_parts_end_when_a_step_fails_and_when_somebody_presses_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def tell(error: BaseException) -> int:
        def step(there: World) -> str:
            there.stack.callback(ended.append, type(error).__name__)
            raise error

        monkeypatch.setattr(demo, "STORY", {"one": step, "two": step})
        return demo.tell(tmp_path / type(error).__name__, Overview(["one", "two"]))

    assert tell(StepFailed("no")) == demo.FAILED
    assert tell(KeyboardInterrupt()) == demo.INTERRUPTED
    assert ended == ["StepFailed", "KeyboardInterrupt"]


def test_the_overview_names_who_noticed_with_code_and_line() -> None:
    overview = Overview(["one"])
    overview.noticed.append(Noticed("a tag", "sm120 verify x:v1", 75, "moved after signing"))
    last = overview.tables().splitlines()[-1]
    for part in ("a tag", "sm120 verify x:v1", "75", "moved after signing"):
        assert part in last
    assert overview.as_json()["noticed"][0]["code"] == 75


def test_a_folder_of_somebody_s_own_is_never_removed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years")
    with pytest.raises(FileExistsError, match="no demo has written it"):
        make_empty(mine)
    with pytest.raises(SystemExit):
        demo.main(["--output", str(mine)])
    assert (mine / "thesis.txt").read_text() == "years"


def test_a_folder_of_an_earlier_demo_is_replaced(tmp_path: Path) -> None:
    for _ in range(2):
        make_empty(tmp_path / "demo")
        assert [p.name for p in (tmp_path / "demo").iterdir()] == [world.MARK]
        (tmp_path / "demo" / "old").mkdir()


def test_a_command_that_ends_otherwise_is_named_with_its_line_and_its_output(here: World) -> None:
    here.overview.records.append(StepRecord("x"))
    for name in ("images", "lockfiles"):
        (here.checkout / name).mkdir()
    with pytest.raises(StepFailed, match=r"`sm120 plan nothing` ended with \d+: .*nothing") as why:
        here.shell.sm120("plan", "nothing")
    assert str(here.folder / "logs" / "01.txt") in str(why.value)
    assert "$ sm120 plan nothing\n" in (here.folder / "logs" / "01.txt").read_text()
    with pytest.raises(StepFailed, match="not with 75"):
        here.shell.sm120("plan", "nothing", expect=75)


def test_the_line_of_a_command_is_its_error_and_not_the_hint() -> None:
    ended = Ended("sm120 x", 4, "", "Fetching\nsm120: x: locked as 1\n       Compare.\n")
    assert ended.line == "x: locked as 1"
    assert Ended("sm120 x", 0, "one\ntwo\n", "").line == "two"


def test_the_demo_s_recipe_and_image_are_valid(here: World) -> None:
    write_checkout(here.checkout)
    write_recipe(here.checkout, 8080)
    recipe = Recipes([here.checkout / "recipes"]).read(RECIPE)
    assert (recipe.image, recipe.model.weights) == (IMAGE, "tiny")
    here.overview.records.append(StepRecord("x"))
    with pytest.raises(StepFailed, match="ended with"):
        # its wheels are not here; its spec, patch and locks are read before
        here.shell.sm120("build", IMAGE, "--offline", "--platform", "host")
    assert PATCH in (here.checkout / "images" / IMAGE / "patches" / "series.yaml").read_text()


def run(here: World, *steps: Callable[[World], str]) -> None:
    for step in steps:
        demo.run_step(here, step)


def test_a_weight_s_flipped_byte_is_noticed_by_verify_and_taken_back(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a plan of the weights alone; its commands are processes, which ask the Hub
    whole = story.stages

    def only_weights(there: World) -> dict[str, story.Stage]:
        kept = ("lock", WEIGHTS_STAGE, "proof")
        return {name: stage for name, stage in whole(there).items() if name in kept}

    def no_registry(*_: object, **__: object) -> None:
        raise CannotHave("The program docker-registry is not installed.")

    monkeypatch.setattr(story, "stages", only_weights)
    monkeypatch.setattr(story, "oci_registry", no_registry)
    here.shell.__class__ = Shell
    run(here, story.begin, story.first_stages)
    rows = [(x.title, x.state, x.result) for x in here.overview.records[1].stages]
    assert rows[0] == (PUBLISH, "left out", "The program docker-registry is not installed.")
    assert [row[:2] for row in rows[1:]] == [
        ("lock", "done"),
        (WEIGHTS_STAGE, "done"),
        ("proof", "done"),
    ]
    assert rows[3][2].startswith("2 files are as locked, by sha256:")
    assert "  proof" in here.overview.tables()
    assert here.overview.records[1].result.startswith("3 of 3 stages ran")
    # it goes on where it was: nothing is left to do
    assert story.run_plan(here).startswith("0 of 3 stages ran")
    ended = breaks.weight_byte(here, ())
    assert ended.code == 60
    assert "1 file is not as locked: 1 changed" in ended.line
    assert here.shell.sm120("weights", "verify", str(here.weights)).code == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('[1/2] x\n[WARNING]: {odd}\n{"a": [1]}\n', {"a": [1]}),
        ('Fetching\n[{"b": 2}]\nkept in x\n', [{"b": 2}]),
        ("done\n", None),
        ('{"cut": 1\n', None),
    ],
)
def test_the_answer_of_a_command_is_found_after_its_progress(text: str, answer: object) -> None:
    assert story.answer_of(text) == answer


@pytest.mark.usefixtures("no_slow_helpers")
def test_an_edited_patch_is_noticed_by_the_next_build_and_taken_back(
    here: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit = makers.Edit("pkg/a.py", b"one = 1\n", b'one = "patched by the demo"\n')
    mirror = here.folder / "mirror"
    mirror.mkdir()
    wheel = makers.make_wheel(mirror, "pkg", {"pkg/a.py": edit.before})
    files = makers.patch_files(edit, file=PATCH)
    files[f"patches/{PATCH}"] = files.pop("patches/0001.patch")
    root = makers.root_image([makers.make_deb(mirror, "base-files")], name="root")
    image = makers.wheel_image(IMAGE, [wheel], patches="patches/series.yaml")
    makers.make_checkout(here.checkout, root, makers.Image(image.spec, image.wheels, files=files))
    monkeypatch.setenv("SM120_MIRRORS", str(mirror))
    monkeypatch.setattr("pipeline.app.workspace.host_platform", lambda: makers.AMD64)
    here.overview.records.append(StepRecord("x"))
    build = ("build", IMAGE, "--offline", "--platform", "host", "--accept")
    here.image = here.shell.sm120(*build).out
    ended = breaks.edited_patch(here, ())
    assert PATCH in ended.line
    assert here.shell.sm120(*build[:-1]).code == 0


def test_another_digit_in_a_report_is_noticed_by_verify_with_its_own_code_and_taken_back(
    here: World,
) -> None:
    here.overview.records.append(StepRecord("x"))
    here.report = here.folder / "report.html"
    here.shell.sm120("report", str(FOLDER), "--output", str(here.report))
    page = here.report.read_bytes()
    ended = breaks.report_number(here, ("--look-in", str(FOLDER)))
    assert ended.code == 77
    assert "report.html" in ended.line
    assert here.report.read_bytes() == page


def test_without_what_it_breaks_a_break_is_left_out_and_said(here: World) -> None:
    missed = breaks.break_all(here, ())
    assert [each.partition(" (")[0] for each in missed] == list(breaks.BREAKS)
    assert here.overview.noticed == []


@pytest.mark.parametrize("act", [breaks.moved_tag, breaks.host_setting, breaks.report_number])
def test_a_break_never_counts_as_noticed_where_nothing_was_broken(
    here: World, act: Callable[[World, tuple[str, ...]], Ended]
) -> None:
    with pytest.raises(LeftOut):
        act(here, ())


def test_exactly_one_digit_of_the_page_s_data_becomes_another() -> None:
    page = b'<p>12</p><script>{"mean": 9, "output_tok_s":{"low":1,"mean":187.5}}</script>'
    other = breaks.with_other_digit(page)
    assert [i for i in range(len(page)) if page[i] != other[i]] == [page.index(b"187.5")]
    with pytest.raises(AssertionError, match="embeds no number"):
        breaks.with_other_digit(b"<p>187.5</p>")


def test_a_flipped_byte_is_one_byte_and_comes_back_also_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(bytes(100))

    def break_and_fail() -> None:
        with breaks.flipped_byte(path, 7):
            assert [i for i, byte in enumerate(path.read_bytes()) if byte] == [7]
            raise KeyError

    with pytest.raises(KeyError):
        break_and_fail()
    assert path.read_bytes() == bytes(100)


def test_the_walk_s_parts_are_named_once_and_in_their_order() -> None:
    wheel = {"title": "1 wheel", "verdict": "valid"}
    image = {"title": "image x sha256:1", "children": [{"title": "signature"}, wheel, wheel]}
    tree = {"title": "report.html", "children": [image, {"title": "host facts n1.json"}]}
    assert breaks.proved_titles(tree) == ["report", "image", "1 wheel", "host facts"]
