from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import PipelineError, UnknownImage
from pipeline.core.net import timing
from pipeline.images.lock.model import read_lock
from pipeline.images.spec.checkout import Checkout
from tests.docs.error_table import error_families, error_kinds
from tests.testbed.fault_server import FaultServer
from tests.unit.support import (
    AMD64,
    ROOT,
    Command,
    Ended,
    build_tiny,
    command,
    lock_to,
    make_wheel,
    tiny_spec,
    write_spec,
)

SECRET = "tr0ub4dor"


def is_plain_error(ended: Ended, error: str) -> bool:
    """One line of what happened, one of what to try, nothing on stdout."""
    lines = ended.err.splitlines()
    says_it = lines[-2].startswith("sm120: ") and lines[-1].startswith("       ")
    return ended.error == error and ended.out == "" and says_it and "Traceback" not in ended.err


@pytest.mark.parametrize("args", [["bild"], ["build", "--fast"], ["store", "empty"], ["load"]])
def test_a_misspelt_command_is_answered_without_a_traceback(
    sm120: Command, args: list[str]
) -> None:
    ended = sm120(*args)
    assert ended.code == 2
    assert "Usage:" in ended.err
    assert "Traceback" not in ended.err


def test_every_family_of_errors_has_a_code_of_its_own_and_a_meaning() -> None:
    families = error_families()
    codes = [family.exit_code for family in families]
    assert len(codes) == len(set(codes)) <= 40
    assert len({family.meaning for family in families}) == len(codes)
    assert not {0, 2, 126, 127, 128, 137, 141, 143} & set(codes)


def test_every_kind_of_error_has_its_familys_code_and_a_meaning_of_its_own() -> None:
    for family in error_families():
        for kind in error_kinds(family):
            assert kind.exit_code == family.exit_code
            assert kind is family or kind.meaning != family.meaning
            assert "exit_code" not in vars(kind) or kind is family


@pytest.mark.usefixtures("checkout")
def test_an_error_of_a_command_that_answers_in_json_is_json_with_its_class(sm120: Command) -> None:
    ended = sm120("plan", "other", "--json")
    assert (ended.code, ended.out, ended.error) == (41, "", "UnknownImage")
    assert json.loads(ended.err) == {
        "error": "UnknownImage",
        "exit_code": 41,
        "message": "there is no image 'other' (there are: tiny)",
        "hint": UnknownImage.hint,
    }


def test_images_lists_what_there_is(sm120: Command, checkout: Checkout) -> None:
    (row,) = sm120("image", "list", "--json").json
    assert row["image"] == "tiny"
    assert (row["locked"], row["built"]) == (True, None)
    assert "tiny" in sm120("image", "list").out


def test_plan_fetches_nothing(sm120: Command, checkout: Checkout) -> None:
    answer = sm120("plan", "--json").json
    assert (answer["images"], answer["fetch_files"]) == (["tiny"], 1)
    assert "1 file to fetch" in sm120("plan", "tiny").out


def test_a_dry_run_of_a_build_is_a_plan(sm120: Command, checkout: Checkout) -> None:
    assert sm120("build", "tiny", "--dry-run").out == sm120("plan", "tiny").out
    assert sm120("build", "--dry-run", "--json").json["layers_missing"] != []
    assert sm120("image", "list", "--json").json[0]["built"] is None


def test_a_dry_run_of_collecting_fetches_nothing(
    sm120: Command, checkout: Checkout, tmp_path: Path
) -> None:
    ended = sm120("image", "collect", "tiny", "--output", tmp_path / "usb", "--dry-run")
    assert (ended.code, "1 file, " in ended.out) == (0, True)
    assert not (tmp_path / "usb").exists()


def test_what_was_collected_is_there_for_programs_too(
    sm120: Command, checkout: Checkout, tmp_path: Path
) -> None:
    usb, wheel = tmp_path / "usb", tmp_path / "mirror" / "thing-1.0-py3-none-any.whl"
    head = ("image", "collect", "tiny", "--output", usb, "--mirror", tmp_path / "mirror", "--json")
    images = {"files": 1, "size_bytes": wheel.stat().st_size}
    for arguments, dry_run in ((("--dry-run",), True), ((), False)):
        assert sm120(*head, *arguments).json == {
            "folder": str(usb),
            "images": images,
            "tool": None,
            "dry_run": dry_run,
        }
        assert usb.exists() is not dry_run


def test_an_export_refuses_a_folder_that_holds_something(
    sm120: Command, built: str, tmp_path: Path
) -> None:
    (tmp_path / "usb").mkdir()
    (tmp_path / "usb" / "mine").touch()
    assert sm120("image", "export", "tiny", tmp_path / "usb").error == "StoreUnwritable"


def test_the_way_through(sm120: Command, checkout: Checkout, tmp_path: Path) -> None:
    (built,) = json.loads(build_tiny(sm120, "--accept", "--json").out)
    assert (built["image"], built["cached"]) == ("tiny", False)
    (again,) = json.loads(build_tiny(sm120, "--json").out)
    assert (again["digest"], again["cached"]) == (built["digest"], True)
    assert "nothing to do" in build_tiny(sm120).out
    assert sm120("image", "list", "--json").json[0]["built"] == built["digest"]
    assert sm120("plan", "--json").json["layers_missing"] == []
    assert built["digest"] in sm120("image", "export", "tiny", tmp_path / "layout").out
    assert (tmp_path / "layout" / "index.json").exists()
    rebuilt = sm120("image", "rebuild", "tiny", "--offline", "--json").json
    assert (rebuilt["digest"], rebuilt["identical"]) == (built["digest"], True)
    assert rebuilt["platform"] == AMD64
    ended = sm120("image", "rebuild", "tiny", "--offline")
    assert ended.out == f"tiny for {AMD64}: identical, {built['digest']}\n"


def test_a_rebuild_needs_an_image_that_was_built(sm120: Command, checkout: Checkout) -> None:
    assert sm120("image", "rebuild", "tiny").error == "UnknownImage"
    assert sm120("image", "rebuild", "tyni").error == "UnknownImage"


def test_after_a_build_the_ways_with_and_without_docker_are_named(
    sm120: Command, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines(*more: str) -> list[str]:
        return [line.strip() for line in build_tiny(sm120, "--accept", *more).out.splitlines()[-2:]]

    with_docker, without = lines()
    assert with_docker.startswith("Next: sm120 load tiny ")
    assert without.startswith("sm120 image export tiny DIR ")
    assert "without Docker" in without
    for module in ("app.workspace", "cli.image"):
        monkeypatch.setattr(f"pipeline.{module}.host_platform", lambda: AMD64)
    (checkout.root / "recipes").mkdir()
    # as editors leave them
    (checkout.root / "recipes" / ".#mine.yaml").symlink_to("nowhere")
    shipped = (ROOT / "recipes" / "tiny-cpu.yaml").read_text()
    recipe = checkout.root / "recipes" / "tiny-cpu.yaml"
    recipe.write_text(shipped.replace("image: llama-cpp-cpu", "image: tiny"))
    assert lines()[-1].startswith("sm120 serve tiny-cpu "), "a recipe that runs on any machine"
    recipe.write_text(recipe.read_text().replace("{cards: 0}", "{cards: 2, card: rtx-pro-6000}"))
    assert lines()[-1].startswith("sm120 image export"), "one that needs cards"
    write_spec(checkout, tiny_spec(platforms=[AMD64, "linux/arm64"]))
    wheels = read_lock(checkout.lock_path("tiny", AMD64)).wheels
    for platform in (AMD64, "linux/arm64"):
        lock_to(checkout, "tiny", wheels, platform)
    for module in ("app.workspace", "cli.image"):
        monkeypatch.setattr(f"pipeline.{module}.host_platform", lambda: "linux/arm64")
    # for a machine that is not this one
    assert lines("--platform", AMD64)[0].startswith(f"Next: sm120 load tiny --platform {AMD64} ")
    assert lines()[0].startswith("Next: sm120 load tiny  "), "of both, the one for this machine"


def test_a_build_with_nothing_to_do_asks_neither_pip_nor_the_network(
    sm120: Command, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny(sm120, "--accept")

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("asked")

    monkeypatch.setattr("pipeline.core.net.settings._pip_config_list", refuse)
    monkeypatch.setattr("pipeline.core.proc.read", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    assert "nothing to do" in sm120("build", "tiny").out


def test_a_changed_file_of_ours_is_built_without_asking_pip(
    sm120: Command, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny(sm120, "--accept")
    write_spec(checkout, tiny_spec(env={"A": "b"}))

    def refuse() -> str:
        raise AssertionError("asked")

    monkeypatch.setattr("pipeline.core.net.settings._pip_config_list", refuse)
    assert sm120("build", "tiny", "--accept").code == 0


def test_a_new_digest_is_an_error_until_it_is_accepted(sm120: Command, checkout: Checkout) -> None:
    assert is_plain_error(build_tiny(sm120), "GoldenMismatch")
    assert build_tiny(sm120, "--accept").code == 0
    write_spec(checkout, tiny_spec(env={"A": "b"}))
    ended = build_tiny(sm120)
    assert is_plain_error(ended, "GoldenMismatch")
    assert "inputs changed: spec" in ended.err


def test_errors_are_two_lines_with_their_code(
    sm120: Command, checkout: Checkout, tmp_path: Path
) -> None:
    assert is_plain_error(sm120("build", "tiny", "--offline"), "OfflineMiss")
    ended = sm120("build", "tinny")
    assert is_plain_error(ended, "UnknownImage")
    assert "there are: tiny" in ended.err
    assert is_plain_error(sm120("image", "export", "tiny", tmp_path / "x"), "UnknownImage")
    assert is_plain_error(sm120("build", "tiny", "--platform", "linux/arm64"), "SpecInvalid")
    assert is_plain_error(sm120("image", "lock", "--export", "pylock"), "SpecInvalid")
    write_spec(checkout, tiny_spec(python={"requirements": ["thing==2"]}))
    assert is_plain_error(sm120("build", "tiny"), "LockStale")
    assert is_plain_error(sm120("image", "lock", "--check"), "LockStale")
    assert is_plain_error(
        sm120("image", "collect", "tiny", "--output", tmp_path / "y"), "LockStale"
    )
    path = checkout.lock_path("tiny", AMD64)
    path.write_text(path.read_text().replace("thing", "thang"))
    assert is_plain_error(sm120("build", "tiny"), "LockEdited")
    path.unlink()
    assert is_plain_error(sm120("build", "tiny"), "LockMissing")
    (checkout.folder("tiny") / "image.yaml").write_text("name: tiny\n")
    assert is_plain_error(sm120("build", "tiny"), "SpecInvalid")


def test_a_source_that_is_down_is_two_lines_with_its_code(
    sm120: Command, checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "LONGEST_WAIT_S", 0.001)
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"http://me:{SECRET}@127.0.0.1:9/simple")
    ended = sm120("build", "tiny")
    assert is_plain_error(ended, "SourceUnreachable")
    assert "***@127.0.0.1:9" in ended.err
    assert SECRET not in ended.err


@pytest.mark.parametrize(
    "args", [["image", "list"], ["build"], ["plan"], ["image", "lock"], ["build", "tiny"]]
)
def test_a_missing_checkout_is_two_lines(sm120: Command, tmp_path: Path, args: list[str]) -> None:
    assert is_plain_error(sm120(*args), "NoCheckout")
    assert is_plain_error(sm120("--checkout", tmp_path / "gone", *args), "NoCheckout")


@pytest.mark.parametrize("args", [["build"], ["plan"]])
def test_a_checkout_without_images_is_two_lines(
    sm120: Command, tmp_path: Path, args: list[str]
) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "lockfiles").mkdir()
    assert is_plain_error(sm120(*args), "UnknownImage")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.EIO, "Input/output error"), "StoreUnwritable"),
        (OSError(errno.EPROTO, "Protocol error"), "PipelineError"),
        (OSError(errno.ENOSPC, "No space"), "DiskFull"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "StoreUnwritable"),
        (KeyboardInterrupt(), "Interrupted"),
        (RuntimeError("two\nlines"), "PipelineError"),
        (PipelineError("two\nlines", "try this"), "PipelineError"),
    ],
)
def test_any_error_is_two_lines(
    sm120: Command,
    checkout: Checkout,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    kind: str,
) -> None:
    def fail(self: Checkout) -> list[str]:
        raise error

    monkeypatch.setattr(Checkout, "images", fail)
    assert is_plain_error(sm120("image", "list"), kind)
    assert "Traceback" in sm120("--debug", "image", "list").err


def test_a_reader_that_goes_away_is_no_failure_to_speak_of() -> None:
    child = subprocess.Popen(
        command("image", "schema", "image"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    output = child.stderr.read()
    child.stderr.close()
    assert (child.wait(), output) == (141, b"")


def test_nobody_listening_to_progress_is_no_failure(
    sm120: Command, checkout: Checkout, tmp_path: Path
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    args = ("build", "tiny", "--accept", "--offline", "--mirror", tmp_path / "mirror", "--json")
    done = subprocess.run(
        command(*args),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=writing,
        check=False,
    )
    os.close(writing)
    assert done.returncode == 0
    assert json.loads(done.stdout)[0]["image"] == "tiny"


def test_quiet_says_nothing_but_the_answer(
    sm120: Command, checkout: Checkout, tmp_path: Path
) -> None:
    args = ("build", "--accept", "--offline", "--mirror", tmp_path / "mirror")
    ended = sm120("-q", *args)
    assert (ended.code, ended.err) == (0, "")


def test_sources_shows_no_password(sm120: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", f"https://me:{SECRET}@index.example.invalid/simple")
    monkeypatch.setenv("UV_INDEX", f"mine=https://{SECRET}@other.example.invalid/simple")
    monkeypatch.setenv("SM120_MIRRORS", f"http://me:{SECRET}@mirror.example.invalid /folder")
    monkeypatch.setenv("SM120_DEBIAN_MIRROR", f"http://me:{SECRET}@deb.example.invalid/debian")
    pip = f":env:.proxy='me:{SECRET}@proxy.example.invalid:3128'"
    monkeypatch.setattr("pipeline.core.net.settings._pip_config_list", lambda: pip)
    shown = sm120("image", "sources", "--json")
    assert SECRET not in shown.out + sm120("image", "sources").out
    assert shown.json["proxy"] == "***@proxy.example.invalid:3128"
    assert shown.json["mirrors"] == ["http://***@mirror.example.invalid", "/folder"]
    assert len(shown.json["indexes"]) == 2


@pytest.mark.parametrize("what", ["image", "series", "recipe"])
def test_the_schema_is_json(sm120: Command, what: str) -> None:
    assert sm120("image", "schema", what).json["type"] == "object"


def test_fetch_collects_for_a_machine_without_network(
    sm120: Command, checkout: Checkout, tmp_path: Path
) -> None:
    ended = sm120(
        "image", "collect", "tiny", "--output", tmp_path / "usb", "--mirror", tmp_path / "mirror"
    )
    assert "1 file," in ended.out
    (tmp_path / "mirror" / "thing-1.0-py3-none-any.whl").unlink()
    ended = sm120("build", "--accept", "--offline", "--mirror", tmp_path / "usb")
    assert ended.code == 0


# Locking, with the real uv and an index on loopback.


@pytest.fixture
def index(server: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultServer:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv-cache"))
    monkeypatch.setenv("UV_DEFAULT_INDEX", server.index)
    for path in (
        make_wheel(tmp_path / "served", "thing", "2.0", requires=["dep-a"]),
        make_wheel(tmp_path / "served", "dep-a"),
    ):
        server.add(path.name, path.read_bytes())
    return server


def locks(checkout: Checkout) -> dict[str, str]:
    folder = checkout.root / "lockfiles" / "images"
    return {p.name: p.read_text() for p in folder.iterdir()}


def test_lock_diff_says_what_would_move_and_writes_nothing(
    sm120: Command, checkout: Checkout, index: FaultServer
) -> None:
    before = locks(checkout)
    ended = sm120("image", "lock", "--dry-run")
    assert "2 would change" in ended.out
    moves = [
        (m["name"], m["before"], m["after"])
        for m in sm120("image", "lock", "--dry-run", "--json").json
    ]
    assert moves == [("dep-a", None, "1.0"), ("thing", "1.0", "2.0")]
    assert locks(checkout) == before


def test_lock_writes_and_the_second_time_nothing_moves(
    sm120: Command, checkout: Checkout, index: FaultServer
) -> None:
    assert "2 changed" in sm120("image", "lock").out
    written = locks(checkout)
    assert "nothing changed" in sm120("image", "lock").out
    assert locks(checkout) == written
    assert "://" not in "".join(written.values())
    (row,) = sm120("image", "lock", "--check", "--json").json
    assert (row["image"], row["wheels"]) == ("tiny", 2)
    assert "dep-a==1.0" in sm120("image", "lock", "tiny", "--export", "requirements").out
    assert 'lock-version = "1.0"' in sm120("image", "lock", "tiny", "--export", "pylock").out
    assert sm120("build", "--accept", "--json").json[0]["image"] == "tiny"


def test_an_edited_lock_can_be_made_anew(
    sm120: Command, checkout: Checkout, index: FaultServer
) -> None:
    checkout.lock_path("tiny", AMD64).write_text("format: 1\n")
    assert is_plain_error(sm120("image", "lock", "--check"), "LockEdited")
    assert sm120("image", "lock").code == 0
    assert sm120("image", "lock", "--check").code == 0


def test_a_first_diff_needs_no_lock_of_the_base(
    sm120: Command, checkout: Checkout, index: FaultServer
) -> None:
    checkout.lock_path("tiny", AMD64).unlink()
    write_spec(checkout, tiny_spec("upper", base="tiny", debian=None))
    touched = {m["image"] for m in sm120("image", "lock", "--dry-run", "--json").json}
    assert touched == {"tiny", "upper"}
    assert locks(checkout) == {}


def test_a_requirement_that_nothing_answers_is_told_in_two_lines(
    sm120: Command, checkout: Checkout, index: FaultServer
) -> None:
    before = locks(checkout)
    write_spec(checkout, tiny_spec(python={"requirements": ["thing==9"]}))
    ended = sm120("image", "lock")
    assert is_plain_error(ended, "ResolveFailed")
    assert "thing==9" in ended.err
    assert locks(checkout) == before


def test_locks_of_images_on_one_another_are_made_in_order(
    sm120: Command, checkout: Checkout, index: FaultServer
) -> None:
    write_spec(checkout, tiny_spec("above", base="tiny", debian=None))
    lock_to(checkout, "above", [])
    assert sm120("image", "lock", "above", "tiny").code == 0
    assert sm120("image", "lock", "--check").code == 0


def test_the_store_option_wins_over_the_variable(sm120: Command, tmp_path: Path) -> None:
    open_store(tmp_path / "mine")
    shown = sm120("--store", tmp_path / "mine", "store", "show", "--json").json
    assert shown["root"] == str(tmp_path / "mine")


@pytest.mark.usefixtures("no_slow_helpers")
def test_an_image_that_was_built_before_an_edit_is_stale_and_not_unbuilt(
    sm120: Command, checkout: Checkout, tmp_path: Path
) -> None:
    build_tiny(sm120, "--accept")
    assert sm120("image", "list", "--json").json[0]["stale"] == ""
    write_spec(checkout, {**tiny_spec(), "env": {"A": "b"}})
    ended = sm120("image", "export", "tiny", tmp_path / "to")
    assert (ended.code, ended.error) == (41, "ImageStale")
    assert "is stale: spec changed since it was built" in ended.err
    assert "`sm120 build tiny` again" in ended.err
    (row,) = sm120("image", "list", "--json").json
    assert row["stale"] == "spec changed since it was built"
    assert ", stale" in sm120("image", "list").out


@pytest.mark.usefixtures("no_slow_helpers")
def test_an_image_of_another_version_of_this_tool_is_stale(
    sm120: Command, checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_tiny(sm120, "--accept")
    monkeypatch.setattr("pipeline.images.assemble.image.code_digest", lambda: f"sha256:{'0' * 64}")
    assert "another version of this tool" in sm120("image", "export", "tiny", tmp_path / "to").err


@pytest.mark.usefixtures("no_slow_helpers")
def test_a_built_image_whose_lock_is_out_of_date_is_listed_as_stale(
    sm120: Command, checkout: Checkout
) -> None:
    build_tiny(sm120, "--accept")
    write_spec(checkout, {**tiny_spec(), "python": {"requirements": ["thing==2.0"]}})
    (row,) = sm120("image", "list", "--json").json
    assert "the spec has changed since it was locked" in row["stale"]
