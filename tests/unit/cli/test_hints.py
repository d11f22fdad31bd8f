"""What a mistake is answered with: the hint must be one that helps with this mistake."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import default_root
from pipeline.cli.output import own_command
from pipeline.core import log
from pipeline.images.lock.model import read_lock
from pipeline.images.spec.checkout import Checkout
from tests.testbed.oci_door import Door
from tests.unit.bench.example_run import FOLDER
from tests.unit.support import (
    AMD64,
    ARM64,
    ROOT,
    Command,
    build_tiny,
    lock_to,
    make_checkout,
    make_wheel,
    tiny_spec,
    write_spec,
)

GATE = ("--checkout", ROOT, "gate")


def hint(sm120: Command, *args: str | Path) -> str:
    """The last line of what a failed command prints."""
    ended = sm120(*args)
    assert ended.code != 0
    return ended.err.splitlines()[-1].strip()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["patches", "sglang-k2", "--without-sandbox", "--against", "foo"], "foo: is neither"),
        (["run", "sglang-k2", "--only", "smem", "--case", "nope*"], "nope*: matches no case"),
        (["run", "sglang-k2", "--only", "smem", "--arch", "foo"], "foo: is not a known card"),
        (["run", "sglang-k2", "--series", "nope"], "has no patch series 'nope'"),
        (["run", "llama-cpp-cpu"], "has no gates"),
    ],
)
def test_what_a_gate_cannot_do_is_said_before_anything_is_fetched(
    sm120: Command, asked: list[str], message: str
) -> None:
    # the store is empty: with --offline, looking for any file ends as OfflineMiss
    ended = sm120(*GATE, *asked, "--offline")
    assert ended.error == "GateInvalid"
    assert message in ended.err
    assert "Fetching" not in ended.err
    assert "Fix the named field" not in ended.err


@pytest.mark.parametrize("verb", ["scrub", "check-signature", "serve"])
def test_a_hint_names_no_option_that_the_command_has_not(
    sm120: Command, tmp_path: Path, verb: str
) -> None:
    assert "--lock" not in hint(sm120, "weights", verb, tmp_path)
    assert "--lock" in hint(sm120, "weights", "verify", tmp_path)


def test_a_folder_for_keys_that_cannot_be_made_is_not_taken_for_the_store(
    sm120: Command, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "x", Path("/proc/x")):
        ended = sm120("evidence", "new-key", "a", "--output", folder)
        assert ended.error == "StoreUnwritable"
        assert ended.err.splitlines()[-1].strip() == "Name a folder you can write with --output."


def test_a_key_that_is_not_there_is_not_answered_with_making_one(sm120: Command) -> None:
    assert "`sm120 evidence list-keys` lists them" in hint(sm120, "evidence", "show-key", "nope")


def test_a_repository_is_asked_for_where_one_is_wanted(sm120: Command) -> None:
    expected = "Write REGISTRY/REPOSITORY, such as registry.example/library/python."
    assert hint(sm120, "registry", "tags", "library/python") == expected


def test_a_repository_that_is_not_there_is_not_asked_for_again(sm120: Command, door: Door) -> None:
    answer = hint(sm120, "registry", "tags", f"{door.host_port}/team/nope")
    assert answer == "Correct its name; a repository begins with the first `sm120 publish` to it."


def test_a_mirror_of_host_packages_that_is_not_there_is_not_taken_for_one_of_images(
    sm120: Command, tmp_path: Path
) -> None:
    named = ("--target", "ubuntu-24.04/amd64", "--repository", tmp_path / "nope", "--dry-run")
    answer = hint(sm120, "--checkout", ROOT, "host", "lock", *named, "--keyring", tmp_path / "key")
    assert answer == "Check --repository, --suite and the network, then run it again."


def test_verify_names_what_it_can_read(sm120: Command, tmp_path: Path) -> None:
    assert "REGISTRY/REPOSITORY:TAG" in hint(sm120, "--checkout", ROOT, "verify", "mine:v1")
    (tmp_path / "result.json").write_text("{}")
    asked = hint(sm120, "verify", tmp_path / "result.json")
    assert asked == "Name its statements with --evidence."


@pytest.mark.parametrize("name", ["d.md", "d.csv", "d.pdf"])
def test_of_a_report_only_the_page_can_be_verified(
    sm120: Command, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).write_text("# Benchmark")
    asked = hint(sm120, "verify", tmp_path / name)
    assert asked.startswith("Of a report, only the HTML page is stated and can be verified")


@pytest.mark.parametrize("name", ["nope.html", "bench/nope.html", "/tmp/nope.json"])
def test_a_page_that_is_not_there_is_no_image(sm120: Command, name: str) -> None:
    ended = sm120("--checkout", ROOT, "verify", name)
    assert ended.error == "UnknownImage"
    assert f"{name}: no such file\n" in ended.err
    assert "REGISTRY" not in ended.err


def test_a_folder_that_is_no_run_is_answered_with_what_a_run_is(
    sm120: Command, tmp_path: Path
) -> None:
    asked = hint(sm120, "report", tmp_path)
    assert asked.startswith("A RUN is a folder that `sm120 bench` made: it holds bench.json.")


def test_an_unsigned_report_is_answered_with_what_signs_it(sm120: Command) -> None:
    sm120("report", "--reference", "kimi-k2-sm120", "--output", "k.html")
    ended = sm120("verify", "k.html")
    assert ended.error == "EvidenceUnsigned"
    assert ended.err.splitlines()[-1].endswith("new-key NAME`, then the same `sm120 report` again.")
    sm120("evidence", "new-key", "me")
    assert sm120("verify", "k.html").error == "EvidenceUnsigned"
    sm120("report", "--reference", "kimi-k2-sm120", "--output", "k.html")
    assert sm120("verify", "k.html").code == 0


def test_a_run_without_facts_of_its_host_is_answered_with_how_to_get_them(
    sm120: Command, tmp_path: Path
) -> None:
    ended = sm120("--checkout", ROOT, "verify", FOLDER)
    assert "no facts of the host were given" in ended.out
    (last,) = ended.err.splitlines()[-1:]
    assert last.strip().startswith("Facts of the host cannot be added to a finished run.")
    for step in ("host facts --json > facts.json", "host attest facts.json", "--host-facts"):
        assert step in last


def test_a_file_that_holds_no_facts_is_described_in_plain_words(
    sm120: Command, tmp_path: Path
) -> None:
    path = tmp_path / "facts.md"
    path.write_text("# Facts\n")
    assert "not a file of host facts: it is not JSON" in sm120("host", "drift", path).err
    path.write_text("{}")
    assert "HostFacts" not in sm120("host", "drift", path).err
    assert "`sm120 host facts --capture`" in hint(sm120, "host", "check", "--root", path)


@pytest.mark.parametrize("verb", ["verify", "provision", "rollback"])
def test_an_inventory_that_is_not_there_is_named(sm120: Command, verb: str) -> None:
    ended = sm120("--checkout", ROOT, "host", verb, "-i", "nope")
    assert ended.error == "FleetUnready"
    assert "nope: no such inventory" in ended.err


def test_help_shows_no_mark_of_the_code_that_prints_it(sm120: Command) -> None:
    text = sm120("completion", "--help").out
    assert "\\b" not in text
    assert '  zsh:  eval "$(sm120 completion zsh)"   in ~/.zshrc, after compinit\n' in text


def test_one_thing_is_not_counted_as_several() -> None:
    assert [log.count(n, "rule") for n in (0, 1, 2)] == ["0 rules", "1 rule", "2 rules"]
    assert log.count(1, "case fails", "cases fail") == "1 case fails"
    assert log.count(3, "case fails", "cases fail") == "3 cases fail"


def test_offline_names_how_many_files_are_missing_and_fetches_none(
    sm120: Command, tmp_path: Path
) -> None:
    wheels = [make_wheel(tmp_path / "mirror", name) for name in ("thing", "other")]
    make_checkout(tmp_path, wheels)
    ended = sm120("build", "tiny", "--offline")
    assert ended.error == "OfflineMiss"
    assert "2 files are not in the store, such as " in ended.err
    assert "Looking for 2 files" in ended.err
    assert "Fetching" not in ended.err
    lone = tmp_path / "lone"
    lone.mkdir()
    wheels[0].rename(lone / wheels[0].name)
    ended = sm120("build", "tiny", "--offline", "--mirror", lone)
    assert f"{wheels[1].name}: not in the store" in ended.err


@pytest.mark.parametrize(
    ("image", "fix"),
    [
        ("sglang-k2", "Run `sm120 build sglang-k2` first."),
        ("vllm", "Run `sm120 build vllm --platform linux/arm64` first."),
    ],
)
def test_an_image_that_is_not_built_is_named_with_the_platform_where_it_has_several(
    sm120: Command, tmp_path: Path, image: str, fix: str
) -> None:
    platform = "linux/arm64" if image == "vllm" else "linux/amd64"
    asked = ("image", "export", image, tmp_path / "to", "--platform", platform)
    assert hint(sm120, "--checkout", ROOT, "--store", tmp_path / "store", *asked) == fix


def test_all_images_for_a_platform_are_those_that_are_for_it(
    sm120: Command, checkout: Checkout
) -> None:
    wheels = read_lock(checkout.lock_path("tiny", AMD64)).wheels
    write_spec(checkout, tiny_spec("other", platforms=[ARM64]))
    lock_to(checkout, "other", wheels, ARM64)
    assert sm120("plan", "--platform", AMD64, "--json").json["images"] == ["tiny"]
    assert sm120("plan", "--platform", ARM64, "--json").json["images"] == ["other"]
    assert sm120("plan", "other", "--platform", AMD64).error == "SpecInvalid"


def test_a_rebuild_without_network_says_where_its_inputs_can_come_from(
    built: str, sm120: Command, tmp_path: Path
) -> None:
    shutil.rmtree(default_root() / "inputs")
    fix = hint(sm120, "image", "rebuild", "tiny", "--offline")
    assert "`sm120 image collect tiny --output DIR`" in fix
    # what it says is true
    sm120("image", "collect", "tiny", "--output", tmp_path / "usb", "--mirror", tmp_path / "mirror")
    again = sm120("image", "rebuild", "tiny", "--offline", "--mirror", tmp_path / "usb")
    assert again.code == 0, again.err


@pytest.mark.usefixtures("checkout")
def test_a_mirror_that_is_not_there_is_named(sm120: Command, tmp_path: Path) -> None:
    ended = sm120("build", "tiny", "--offline", "--mirror", tmp_path / "nowhere")
    assert ended.code == 2
    assert f"'{tmp_path / 'nowhere'}' does not exist" in ended.err
    assert sm120("build", "tiny", "--dry-run", "--mirror", "http://127.0.0.1:9/").code == 0


@pytest.mark.parametrize("verb", [("load",), ("verify",), ("image", "files")])
def test_an_image_that_is_built_for_another_platform_says_so(
    sm120: Command, checkout: Checkout, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    wheels = read_lock(checkout.lock_path("tiny", AMD64)).wheels
    write_spec(checkout, tiny_spec(platforms=[AMD64, ARM64]))
    for platform in (AMD64, ARM64):
        lock_to(checkout, "tiny", wheels, platform)
    monkeypatch.setattr("pipeline.app.workspace.host_platform", lambda: ARM64)
    assert hint(sm120, *verb, "tiny") == f"Run `sm120 build tiny --platform {ARM64}` first."
    build_tiny(sm120, "--accept", "--platform", AMD64)
    assert hint(sm120, *verb, "tiny") == (
        f"Run `sm120 build tiny --platform {ARM64}` first,"
        f" or take the one for {AMD64} (--platform {AMD64})."
    )


@pytest.mark.parametrize(
    "words", [("load", "out"), ("publish", "out", "reg.example/a"), ("image", "export", "out", "x")]
)
def test_a_layout_in_place_of_an_images_name_is_told_apart(
    built: str, sm120: Command, words: tuple[str, ...]
) -> None:
    sm120("image", "export", "tiny", "out")
    ended = sm120(*words)
    assert ended.error == "UnknownImage"
    assert "out: is an OCI layout" in ended.err
    assert "`skopeo copy oci:out " in ended.err


@pytest.mark.usefixtures("checkout")
def test_a_mistyped_path_is_neither_a_registry_nor_broken_evidence(
    built: str, sm120: Command, tmp_path: Path
) -> None:
    ended = sm120("verify", tmp_path / "nowhere")
    assert (ended.error, ended.code) == ("UnknownImage", 41)
    assert "nowhere: no such file or folder\n" in ended.err
    ended = sm120("verify", "tiny", "--evidence", tmp_path / "nowhere")
    assert ended.code == 2
    assert "nowhere' does not exist" in ended.err


def test_a_layout_for_another_platform_names_its_own(
    built: str, sm120: Command, tmp_path: Path
) -> None:
    sm120("image", "export", "tiny", tmp_path / "out")
    assert hint(sm120, "verify", tmp_path / "out", "--platform", ARM64) == (
        f"It holds images for {AMD64}: choose one with --platform."
    )


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        (("registry", "tags", "reg.example"), "names no repository", "Write REGISTRY/REPOSITORY"),
        (("registry", "tags", "http://reg.example/a"), "is an address", "Leave out what stands"),
        (("registry", "tags", "team/app"), "does not begin with a registry", "Write REGISTRY"),
    ],
)
def test_what_is_no_name_in_a_registry_is_told_why(
    sm120: Command, words: tuple[str, ...], message: str, fix: str
) -> None:
    ended = sm120(*words)
    assert (ended.error, message in ended.err) == ("ReferenceInvalid", True)
    assert fix in ended.err


@pytest.mark.usefixtures("checkout")
def test_an_image_that_is_not_there_is_told_before_a_missing_key(sm120: Command) -> None:
    assert sm120("evidence", "make", "nope").error == "UnknownImage"
    assert sm120("evidence", "make", "tiny").error == "UnknownImage"


def test_a_file_that_cannot_be_read_is_not_said_to_have_a_wrong_field(
    sm120: Command, checkout: Checkout, tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    recipe = tmp_path / "own" / "mine.yaml"
    recipe.touch()
    os.truncate(recipe, 9 << 20)  # no mode keeps root from reading
    named = "Check which file is named: none of its kind is so large."
    assert hint(sm120, "render", "mine", "--as", "env", "--recipes", tmp_path / "own") == named
    assert hint(sm120, "bench", "http://127.0.0.1:9", "--workload", recipe) == named
    gone = hint(sm120, "bench", "http://127.0.0.1:9", "--workload", "gone.yaml")
    assert gone == "Check that the file is there and that you may read it."


def test_a_folder_that_holds_nothing_to_verify_may_have_been_meant_as_a_run(
    sm120: Command, tmp_path: Path
) -> None:
    (tmp_path / "night").mkdir()
    ended = sm120("verify", tmp_path / "night")
    assert ended.code == 41
    assert "no run of a benchmark" in ended.err
    assert "`bench` made" in ended.err


def test_hints_name_the_command_as_the_user_can_call_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / ".nox/run/bin/sm120"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOX_CURRENT_SESSION", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert own_command() == ".nox/run/bin/sm120"
    monkeypatch.setenv("PATH", str(program.parent))
    assert own_command() == "sm120"
    # of a session's own PATH the user has nothing
    monkeypatch.setenv("NOX_CURRENT_SESSION", "build-sm120")
    assert own_command() == ".nox/run/bin/sm120"
