"""A bundle holds all that a plan needs, and nothing of it is used before all of it was checked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from pipeline.app import bundle, deliver
from pipeline.app.bundle import (
    MANIFEST,
    SYSTEM_PACKAGES,
    BundleManifest,
    serve_bundle,
    unbundle,
)
from pipeline.app.signing import signer_of
from pipeline.app.statements import sign_file
from pipeline.app.workspace import Workspace
from pipeline.artifacts.attest.keys import LocalSigner, make_private_key
from pipeline.core.errors import AddressUnusable
from pipeline.core.model import sha256_of
from tests.testbed.apt_repository import StandIn, new_repository, nvidia_packages
from tests.testbed.hub import test_hub as small_hub
from tests.testbed.signer import Signer, new_signer
from tests.unit.support import ROOT, Command, Ended, make_checkout, make_wheel

STAGES = {
    "image": {"run": "build tiny --platform linux/amd64"},
    "page": {"run": "report night --output page.html", "inputs": ["notes"]},
}
SIGNED = f"{MANIFEST}.dsse.json"


@pytest.fixture(autouse=True)
def quick(no_slow_helpers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No processes for builds, and one wheel for this tool's, which pip would download."""

    def collect(workspace: Workspace, folder: Path, *_: object) -> deliver.Collected:
        (folder / "tool").mkdir(parents=True, exist_ok=True)
        (folder / "tool" / "click-8.0-py3-none-any.whl").write_bytes(b"wheel")
        return deliver.Collected(1, 5)

    monkeypatch.setattr(bundle, "collect_own_tool", collect)
    monkeypatch.setattr(bundle, "host_platform", lambda: "linux/amd64")
    monkeypatch.setattr("pipeline.app.workspace.host_platform", lambda: "linux/amd64")


@pytest.fixture
def site(tmp_path: Path, sm120: Command) -> Path:
    """A committed checkout with one image, a key, and a plan beside it."""
    make_checkout(tmp_path / "code", [make_wheel(tmp_path / "mirror", "thing")])
    commit(tmp_path / "code", "init", "-q")
    assert sm120("evidence", "new-key", "maker").code == 0
    home = tmp_path / "home"
    (home / "notes").mkdir(parents=True)
    (home / "notes" / "a.txt").write_text("a\n")
    write_plan(home, **STAGES)
    return tmp_path


def commit(folder: Path, *first: str) -> None:
    """All that lies there."""
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (first, ("add", "-A"), (*who, "commit", "-q", "-m", "all")):
        if words:
            subprocess.run(["git", "-C", str(folder), *words], check=True)


def write_plan(home: Path, **stages: object) -> None:
    (home / "plan.yaml").write_text(yaml.safe_dump({"format": 1, "stages": stages}))


@pytest.fixture
def make(site: Path, sm120: Command) -> Callable[..., Ended]:
    def make(*more: str | Path) -> Ended:
        code = ("--checkout", site / "code", "--store", site / "store")
        given = ("--output", site / "usb", "--mirror", site / "mirror", *more)
        return sm120(*code, "bundle", site / "home" / "plan.yaml", *given)

    return make


@pytest.fixture
def usb(site: Path, make: Callable[..., Ended]) -> Path:
    done = make()
    assert done.code == 0, done.err
    return site / "usb"


@pytest.fixture
def open_it(site: Path, sm120: Command) -> Callable[..., Ended]:
    def open_it(*more: str | Path) -> Ended:
        return sm120("--store", site / "there", "unbundle", site / "usb", *more)

    return open_it


def change(path: Path, data: bytes) -> None:
    """As somebody else would: a hard link to the store is left alone."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def test_a_bundle_lists_every_file_with_its_size_hash_and_purpose(usb: Path) -> None:
    manifest = BundleManifest.model_validate_json((usb / MANIFEST).read_bytes())
    what = {file.path: file.what for file in manifest.files}
    assert what["plan/plan.yaml"] == what["plan/notes/a.txt"] == "the plan and its files"
    assert what["mirror/thing-1.0-py3-none-any.whl"] == "inputs of images"
    assert what["mirror/tool/click-8.0-py3-none-any.whl"] == "wheels of the tool"
    assert what["keys/bundle.pub"] == "public keys"
    assert what["checkout.tar"] == f"checkout at {manifest.commit[:12]}"
    on_disk = {str(p.relative_to(usb)) for p in usb.rglob("*") if p.is_file()}
    assert on_disk == {*what, MANIFEST, SIGNED}
    assert manifest.platform == "linux/amd64"


def test_an_unpacked_checkout_is_on_the_disk_before_it_has_its_name(
    site: Path, usb: Path, open_it: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    real = os.fsync

    def note(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        real(handle)

    monkeypatch.setattr(os, "fsync", note)
    assert open_it("--output", site / "place").code == 0
    unpacked = [p for p in (site / "place" / "checkout").rglob("*") if p.is_file()]
    assert len(unpacked) > 1
    assert {path.stat().st_ino for path in unpacked} <= synced


def test_what_was_built_is_carried_and_behind_the_wall_it_is_in_the_store(
    site: Path, make: Callable[..., Ended], open_it: Callable[..., Ended], sm120: Command
) -> None:
    code = ("--checkout", site / "code")
    built = sm120(
        *code, "--store", site / "store", "build", "tiny", "--mirror", site / "mirror", "--accept"
    )
    assert built.code == 0, built.err
    commit(site / "code")
    assert make().code == 0
    done = open_it("--output", site / "place", "--json")
    assert done.code == 0, done.err
    assert done.json["images"] == ["tiny for linux/amd64"]
    there = ("--checkout", site / "place" / "checkout", "--store", site / "there")
    again = sm120(*there, "build", "tiny", "--offline", "--json")
    assert again.code == 0, again.err
    assert again.json[0]["cached"] is True
    assert sm120(*there, "verify", "tiny").code == 0
    # other machines read it from a registry, whose answers carry its digest
    workspace = Workspace(checkout_path=site / "code", store_path=site / "there")
    opened = unbundle(workspace, site / "usb", site / "place")
    with serve_bundle(workspace, opened, host="127.0.0.1", port=0) as hub:
        threading.Thread(target=hub.run, daemon=True).start()
        registry = hub.endpoint.removeprefix("http://")
        pull = ("registry", "pull", f"{registry}/tiny:amd64", site / "pulled", "--insecure-http")
        pulled = sm120(*pull, "--json")
        assert pulled.code == 0, pulled.err
        assert pulled.json["digest"] == again.json[0]["digest"]
        for name in ("tiny:arm64", "other:amd64", f"tiny@sha256:{'0' * 64}"):
            place = site / "nowhere"
            wrong = sm120("registry", "pull", f"{registry}/{name}", place, "--insecure-http")
            assert wrong.code != 0
            assert not place.exists()
        with urllib.request.urlopen(f"{hub.endpoint}/v2/tiny/tags/list") as answer:
            assert json.loads(answer.read()) == {"name": "tiny", "tags": ["amd64"]}
    # and from its inputs alone, in a store that has nothing
    fresh = ("--checkout", site / "place" / "checkout", "--store", site / "fresh")
    mirror = ("--offline", "--mirror", site / "place" / "mirror")
    anew = sm120(*fresh, "build", "tiny", *mirror, "--json")
    assert anew.json[0]["digest"] == again.json[0]["digest"]
    assert anew.json[0]["cached"] is False


def test_a_second_run_fetches_nothing_again_and_a_killed_one_is_finished(
    usb: Path, make: Callable[..., Ended], open_it: Callable[..., Ended], site: Path
) -> None:
    wheel = usb / "mirror" / "thing-1.0-py3-none-any.whl"
    before = wheel.stat().st_ino
    (usb / "mirror" / ".other.whl.partial").write_bytes(b"half")
    (usb / MANIFEST).unlink()
    # nothing is there to fetch from
    shutil.rmtree(site / "mirror")
    shutil.rmtree(site / "store")
    (site / "mirror").mkdir()
    assert make().code == 0
    assert wheel.stat().st_ino == before
    assert not list(usb.rglob("*.partial"))
    assert open_it().code == 0


def test_a_dry_run_tells_the_bytes_and_writes_nothing(
    site: Path, make: Callable[..., Ended]
) -> None:
    done = make("--dry-run", "--json")
    sizes = {part["what"]: part["size_bytes"] for part in done.json["parts"]}
    wheel = site / "mirror" / "thing-1.0-py3-none-any.whl"
    assert sizes["inputs of images"] == wheel.stat().st_size
    assert not (site / "usb").exists()


def test_what_is_not_brought_is_named(site: Path, make: Callable[..., Ended]) -> None:
    (site / "outside").write_text("x")
    (site / "code" / "draft.txt").write_text("x")
    write_plan(site / "home", one={"run": "report ../outside"}, **STAGES)
    left_out = make("--json").json["left_out"]
    assert "../outside of stage one: is not below the plan's folder" in left_out
    assert "draft.txt: is in the checkout, and nobody committed it" in left_out


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("edited", "SpecInvalid", "is changed and not committed"),
        ("cycle", "PlanInvalid", "wait for each other"),
        ("private key", "KeyInvalid", "holds a private key"),
        ("stray", "StoreUnwritable", "is nothing that this plan needs"),
        ("no key", "SigningFailed", "there is no key to sign with"),
        ("other platform", "SpecInvalid", "is not for linux/arm64"),
    ],
)
def test_what_must_not_be_bundled_is_refused(
    site: Path, make: Callable[..., Ended], fault: str, error: str, says: str
) -> None:
    match fault:
        case "edited":
            next((site / "code" / "images").rglob("*.yaml")).open("a").write("# edited\n")
        case "cycle":
            stages = {"a": {"run": "plan", "needs": ["b"]}, "b": {"run": "plan", "needs": ["a"]}}
            write_plan(site / "home", **stages)
        case "private key":
            key = next(Path(os.environ["HOME"]).rglob("maker.pem"))
            shutil.copy(key, site / "home" / "notes" / "innocent.txt")
        case "stray":
            (site / "usb").mkdir()
            (site / "usb" / "holiday.jpg").write_bytes(b"x")
        case "no key":
            shutil.rmtree(next(Path(os.environ["HOME"]).rglob("maker.pem")).parent)
        case "other platform":
            write_plan(site / "home", image={"run": "build tiny --platform linux/arm64"})
    done = make()
    assert (done.error, says in done.err) == (error, True), done.err
    assert not (site / "usb" / MANIFEST).exists()


def spoil(usb: Path, fault: str) -> None:
    wheel = usb / "mirror" / "thing-1.0-py3-none-any.whl"
    manifest = usb / MANIFEST
    match fault:
        case "one byte changed":
            good = wheel.read_bytes()
            change(wheel, good[:-1] + bytes([good[-1] ^ 1]))
        case "a byte more":
            change(wheel, wheel.read_bytes() + b"x")
        case "missing":
            wheel.unlink()
        case "extra":
            (usb / "mirror" / "evil-1.0-py3-none-any.whl").write_bytes(b"x")
        case "swapped":
            other = usb / "plan" / "notes" / "a.txt"
            data = other.read_bytes()
            change(other, wheel.read_bytes())
            change(wheel, data)
        case "linked out":
            shutil.copy(wheel, usb.parent / "copy")
            wheel.unlink()
            wheel.symlink_to(usb.parent / "copy")
        case "folder linked out":
            shutil.move(usb / "plan", usb.parent / "plan")
            (usb / "plan").symlink_to(usb.parent / "plan")
        case "manifest edited":
            change(manifest, manifest.read_bytes().replace(b"linux/amd64", b"linux/arm64"))
        case "manifest linked":
            manifest.rename(usb.parent / MANIFEST)
            manifest.symlink_to(usb.parent / MANIFEST)
        case "unsigned":
            (usb / SIGNED).unlink()
        case "signature emptied":
            body = json.loads((usb / SIGNED).read_text())
            change(usb / SIGNED, json.dumps({**body, "signatures": []}).encode())
        case "a stranger":
            resign(usb, json.loads(manifest.read_text()), LocalSigner(make_private_key()))
        case "no manifest":
            manifest.unlink()


def resign(usb: Path, body: object, signer: LocalSigner) -> None:
    """Another manifest, with a signature of its own."""
    change(usb / MANIFEST, json.dumps(body).encode())
    about = {"plan": f"sha256:{'0' * 64}", "platform": "linux/amd64", "commit": "0" * 40}
    tool = {"name": "sm120-pipeline", "version": "1"}
    (usb / SIGNED).unlink(missing_ok=True)
    sign_file(
        usb / MANIFEST, "bundle", {**about, "files": 1, "size_bytes": 1, "tool": tool}, signer
    )


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        ("one byte changed", 71, "thing-1.0-py3-none-any.whl: has sha256:"),
        ("a byte more", 71, "thing-1.0-py3-none-any.whl: has "),
        ("missing", 71, "thing-1.0-py3-none-any.whl: is missing"),
        ("extra", 71, "evil-1.0-py3-none-any.whl: is not listed in bundle.json"),
        ("swapped", 71, ": has "),
        ("linked out", 71, "is a link or a device, not a plain file"),
        ("folder linked out", 71, "is a link or a device, not a plain file"),
        ("manifest edited", 71, "not about this"),
        ("manifest linked", 71, "is not a plain file"),
        ("unsigned", 72, "nobody vouches for the bundle"),
        ("signature emptied", 72, "nobody signed it"),
        ("a stranger", 73, "only your own keys are trusted here"),
        ("no manifest", 10, "holds no bundle.json"),
    ],
)
def test_a_bundle_that_is_not_whole_is_refused_and_nothing_is_used(
    usb: Path, open_it: Callable[..., Ended], site: Path, fault: str, code: int, says: str
) -> None:
    spoil(usb, fault)
    done = open_it("--output", site / "place")
    assert (done.code, says in done.err) == (code, True), done.err
    assert not (site / "place").exists()
    assert not (site / "there").exists()


def test_a_stranger_is_refused_where_a_trust_file_says_whom_to_believe(
    usb: Path, open_it: Callable[..., Ended], site: Path, sm120: Command
) -> None:
    assert sm120("evidence", "new-key", "friend", "--output", site / "friend").code == 0
    entry = sm120("evidence", "show-key", site / "friend" / "friend.pub").out
    (site / "trust.yaml").write_text(f"format: 1\nkeys:\n{entry}")
    done = open_it("--trust", site / "trust.yaml")
    assert (done.code, "a key that the trust file does not know" in done.err) == (71, True)
    # the key that travels with the bundle counts only where somebody names it
    assert open_it("--trust", site / "trust.yaml", "--key", usb / "keys" / "bundle.pub").code == 0


def own_signer() -> LocalSigner:
    signer = signer_of(None)
    assert isinstance(signer, LocalSigner)
    return signer


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("../store/x", "must be a plain relative path"),
        ("/etc/passwd", "must be a plain relative path"),
        ("mirror/../../x", "must be a plain relative path"),
        ("mirror\\x", "String should match pattern"),
    ],
)
def test_a_signed_manifest_that_leads_out_of_the_folder_is_refused(
    usb: Path, open_it: Callable[..., Ended], path: str, says: str
) -> None:
    body = json.loads((usb / MANIFEST).read_text())
    body["files"][0]["path"] = path
    resign(usb, body, own_signer())
    done = open_it()
    assert (done.code, says in done.err) == (10, True), done.err


def test_a_signed_private_key_is_refused_all_the_same(
    usb: Path, open_it: Callable[..., Ended]
) -> None:
    key = next(Path(os.environ["HOME"]).rglob("maker.pem")).read_bytes()
    change(usb / "keys" / "bundle.pub", key)
    body = json.loads((usb / MANIFEST).read_text())
    for file in body["files"]:
        if file["path"] == "keys/bundle.pub":
            file |= {"size_bytes": len(key), "sha256": sha256_of(key)}
    resign(usb, body, own_signer())
    done = open_it()
    assert (done.error, "holds a private key" in done.err) == ("KeyInvalid", True), done.err


def test_a_file_that_is_listed_twice_and_a_statement_of_another_kind_are_refused(
    usb: Path, open_it: Callable[..., Ended]
) -> None:
    body = json.loads((usb / MANIFEST).read_text())
    resign(usb, {**body, "files": [*body["files"], body["files"][0]]}, own_signer())
    done = open_it()
    assert (done.code, "names a file twice" in done.err) == (10, True), done.err
    report = {"title": "x", "runs": [], "data": f"sha256:{'0' * 64}"}
    (usb / SIGNED).unlink()
    sign_file(usb / MANIFEST, "report", report, own_signer())
    done = open_it()
    assert (done.code, "not bundle" in done.err) == (71, True), done.err


def test_a_bundle_for_another_machine_is_refused_unless_it_is_named(
    usb: Path, open_it: Callable[..., Ended]
) -> None:
    done = open_it("--for", "linux/arm64")
    assert (done.error, "is for linux/amd64, and this machine is linux/arm64" in done.err) == (
        "BundleInvalid",
        True,
    )
    assert open_it("--for", "linux/amd64").code == 0


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    site: Path, make: Callable[..., Ended], small_disk: Path, open_it: Callable[..., Ended]
) -> None:
    (site / "home" / "notes" / "large").write_bytes(os.urandom(3_000_000))
    done = make("--output", small_disk / "usb")
    assert done.error == "DiskFull", done.err
    assert not list(small_disk.rglob(".new-*"))
    (site / "home" / "notes" / "large").unlink()
    assert make("--output", small_disk / "usb").code == 0


def test_a_checked_bundle_is_served_as_an_index_a_mirror_and_a_hub(usb: Path, site: Path) -> None:
    workspace = Workspace(checkout_path=site / "code", store_path=site / "there")
    done = unbundle(workspace, usb)
    with serve_bundle(workspace, done, host="127.0.0.1", port=0) as hub:
        threading.Thread(target=hub.run, daemon=True).start()

        def get(path: str) -> bytes:
            with urllib.request.urlopen(f"{hub.endpoint}{path}") as answer:
                return bytes(answer.read())

        assert b'href="/simple/thing/"' in get("/simple/")
        page = get("/simple/thing/").decode()
        assert "/mirror/thing-1.0-py3-none-any.whl#sha256=" in page
        wheel = usb / "mirror" / "thing-1.0-py3-none-any.whl"
        assert get("/mirror/thing-1.0-py3-none-any.whl") == wheel.read_bytes()
        # a client that is not ours
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--isolated", "--quiet"]
        pip += ["--disable-pip-version-check", "--index-url", f"{hub.endpoint}/simple/"]
        subprocess.run([*pip, "--dest", str(site / "got"), "thing"], check=True)
        assert (site / "got" / wheel.name).read_bytes() == wheel.read_bytes()
        assert b'href="/mirror/tool/click-8.0-py3-none-any.whl"' in get("/mirror/tool/")
        # as apt writes the paths of a flat repository
        assert get("/mirror/./thing-1.0-py3-none-any.whl") == wheel.read_bytes()
        for path in ("/", "/.", "/./plan/plan.yaml"):
            with pytest.raises(urllib.error.HTTPError):
                get(path)
        for path in ("/mirror/../bundle.json", "/plan/plan.yaml", "/simple/other/"):
            with pytest.raises(urllib.error.HTTPError):
                get(path)
    with pytest.raises(AddressUnusable), serve_bundle(workspace, done, host="203.0.113.1", port=1):
        pass


@pytest.fixture
def with_weights(site: Path, sm120: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The checkout has locked a small set of weights, and the plan fetches it."""
    spec = {"name": "little", "repository": "org/little", "format": "safetensors", "quant": "bf16"}
    path = site / "code" / "lockfiles" / "weights" / "little.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(
        yaml.safe_dump({**spec, "about": "A small set of weights to try the commands on."})
    )
    with small_hub() as hub:
        hub.add("org/little", {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 400})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert sm120("--checkout", site / "code", "weights", "lock", "little").code == 0
        commit(site / "code")
        write_plan(site / "home", fetch={"run": "weights fetch little --output /models/little"})
        yield


def test_weights_are_carried_verified_and_fetched_from_there_without_a_hub(
    with_weights: None,
    site: Path,
    make: Callable[..., Ended],
    open_it: Callable[..., Ended],
    sm120: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {part["what"]: part["size_bytes"] for part in make("--dry-run", "--json").json["parts"]}
    assert sizes["weights little"] == 2 + 256 * 400
    assert make().code == 0
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    # again: nothing is asked of a Hub that is gone
    assert make().code == 0
    done = open_it("--output", site / "place")
    assert done.code == 0, done.err
    held = site / "place" / "weights" / "little"
    names = sorted(str(p.relative_to(held)) for p in held.rglob("*") if p.is_file())
    own = [".sm120/lock.yaml", ".sm120/record.dsse.json"]
    assert names == [*own, "config.json", "model.safetensors"]
    there = ("--checkout", site / "place" / "checkout", "weights", "fetch", "little")
    took = sm120(*there, "--output", site / "models", "--from", held, "--offline")
    assert took.code == 0, took.err
    assert (site / "models" / "model.safetensors").read_bytes() == bytes(range(256)) * 400


def test_weights_may_stay_at_home_and_a_hub_that_is_gone_is_an_error(
    with_weights: None,
    make: Callable[..., Ended],
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert make().code == 20
    assert not (site / "usb" / MANIFEST).exists()
    shutil.rmtree(site / "usb")
    assert make("--no-weights", "--json").json["left_out"] == ["weights little: --no-weights"]


def test_packages_of_hosts_come_with_the_signed_index_that_lists_them(
    site: Path, make: Callable[..., Ended], open_it: Callable[..., Ended], sm120: Command
) -> None:
    code, system = site / "code", "debian-12/amd64"
    shutil.copy(ROOT / "lockfiles" / "host.yaml", code / "lockfiles")
    with new_signer("testbed@example.invalid") as signer:
        there = new_repository(site / "repository", signer, nvidia_packages())
        given = ("--repository", there.root, "--keyring", there.keyring)
        locked = sm120("--checkout", code, "host", "lock", "--target", system, *given)
        assert locked.code == 0, locked.err
        commit(code)
        write_plan(site / "home", hosts={"run": "host provision -i hosts.yml"})
        left_out = make("--json").json["left_out"]
        assert any(each.startswith(f"packages of {system}: --repository") for each in left_out)
        key = ("--keyring", there.keyring, "--no-archive")
        named = ("--repository", f"{system}={there.root}", *key)
        done = make(*named, "--json")
        assert done.code == 0, done.err
        assert done.json["left_out"] == [f"packages of the own archive of {system}: --no-archive"]
        held = site / "usb" / "hosts" / "debian-12-amd64"
        assert (held / "InRelease").read_bytes() == (there.root / "InRelease").read_bytes()
        debs = {path.name for path in held.glob("*.deb")}
        assert any(name.startswith("nvidia-") for name in debs)
        assert debs < {path.name for path in there.root.rglob("*.deb")}
        assert open_it().code == 0
        # an index of tomorrow that no longer lists what is locked today
        gone = new_repository(site / "other", signer, nvidia_packages()[:1])
        moved = make("--repository", f"{system}={gone.root}", "--keyring", gone.keyring)
        assert (moved.error, "no longer lists it" in moved.err) == ("LockStale", True), moved.err
        with new_signer("stranger@example.invalid") as other:
            wrong = new_repository(site / "forged", other, nvidia_packages())
            forged = make("--repository", f"{system}={wrong.root}", "--keyring", there.keyring)
            assert forged.error == "SignatureInvalid", forged.err


def write_archive(root: Path, signer: Signer, packages: list[StandIn]) -> Path:
    """A suite of a Debian-like archive: a pool, and a signed index that is found by its hash."""
    flat = new_repository(root / "pool", signer, packages)
    index = "\n".join(x.replace("Filename: ./", "Filename: pool/") for x in flat.stanzas).encode()
    sha256, place = sha256_of(index)[7:], root / "dists" / "bookworm"
    by_hash = place / "main" / "binary-amd64" / "by-hash" / "SHA256" / sha256
    by_hash.parent.mkdir(parents=True)
    by_hash.write_bytes(index)
    text = "Suite: stable\nCodename: bookworm\nDate: Sat, 01 Jan 2022 00:00:00 UTC\n"
    text += f"Acquire-By-Hash: yes\nSHA256:\n {sha256} {len(index)} main/binary-amd64/Packages\n"
    (place / "InRelease").write_bytes(signer.sign(text))
    return root


def test_packages_of_the_hosts_own_system_come_with_all_they_need_and_the_archives_signature(
    site: Path, make: Callable[..., Ended], open_it: Callable[..., Ended], sm120: Command
) -> None:
    code, system = site / "code", "debian-12/amd64"
    shutil.copy(ROOT / "lockfiles" / "host.yaml", code / "lockfiles")
    (code / "ansible" / "vars").mkdir(parents=True)
    listed = {"registry": ["docker-registry", "docker-cli"], "host_tuning": ["slurmd"]}
    (code / "ansible" / "vars" / "system_packages.yml").write_text(yaml.safe_dump(listed))
    write_plan(site / "home", hosts={"run": "host provision -i hosts.yml"})
    own = [StandIn("docker-registry", "2.8", "libx (>= 1)"), StandIn("libx", "1.5")]
    own += [StandIn("slurmd", "22"), StandIn("linux-headers-6.1", "6.1"), StandIn("other", "1")]
    with new_signer("testbed@example.invalid") as signer:
        there = new_repository(site / "repository", signer, nvidia_packages())
        given = ("--repository", there.root, "--keyring", there.keyring)
        locked = sm120("--checkout", code, "host", "lock", "--target", system, *given)
        assert locked.code == 0, locked.err
        commit(code)
        archive = write_archive(site / "archive", signer, own)
        named = (
            *("--repository", f"{system}={there.root}", "--keyring", there.keyring),
            *("--archive", f"{system}={archive}", "--archive-keyring", there.keyring),
        )
        planned = make(*named, "--dry-run", "--json").json["parts"]
        assert f"packages of the own archive of {system}" in {part["what"] for part in planned}
        done = make(*named, "--role", "registry", "--json")
        assert done.code == 0, done.err
        assert done.json["left_out"] == [
            f"docker-cli: the archive of {system} has no such package",
            "headers of the hosts' kernel, which compile the driver:"
            " --package linux-headers-VERSION",
        ]
        held = site / "usb" / "system" / "debian-12-amd64"
        assert {p.name for p in held.rglob("*.deb")} == {
            "docker-registry_2.8_all.deb",
            "libx_1.5_all.deb",
        }
        signed = Path("dists", "bookworm", "InRelease")
        assert (held / signed).read_bytes() == (archive / signed).read_bytes()
        assert open_it().code == 0
        shutil.rmtree(site / "usb")
        kernel = ("--package", "linux-headers-6.1", "--role", "host_tuning")
        assert make(*named, *kernel, "--json").json["left_out"] == []
        assert make(*named, "--role", "nothing").error == "SpecInvalid"
        assert make(*named, "--package", "nothing").error == "UnknownPackage"
        with new_signer("stranger@example.invalid") as other:
            forged = write_archive(site / "forged", other, own)
            wrong = make(*named, "--archive", f"{system}={forged}")
            assert wrong.error == "SignatureInvalid", wrong.err


def test_the_list_of_packages_names_every_one_that_a_role_installs_from_the_hosts_archive() -> None:
    listed = yaml.safe_load((ROOT / SYSTEM_PACKAGES).read_text())
    found: dict[str, set[str]] = {}
    for path in sorted((ROOT / "ansible" / "roles").glob("*/tasks/*.yml")):
        for task in yaml.safe_load(path.read_text()):
            given = task.get("ansible.builtin.apt", {})
            names = given.get("name", [])
            names = [names] if isinstance(names, str) else names
            if given.get("state") == "present":
                found.setdefault(path.parts[-3], set()).update(n for n in names if "{{" not in n)
    # what their names are made of: the engine that is chosen, dkms, and services that come back
    found["container_runtime"] |= {"docker.io", "podman"}
    found["nvidia_driver"] |= {"dkms"}
    assert {role: set(names) for role, names in listed.items()} == {
        role: names for role, names in found.items() if names
    }


def test_a_place_is_never_the_bundle_itself_nor_a_checkout_of_another_one(
    usb: Path, open_it: Callable[..., Ended], make: Callable[..., Ended], site: Path
) -> None:
    inside = open_it("--output", usb / "place")
    assert (inside.error, "is in the bundle itself" in inside.err) == ("StoreUnwritable", True)
    assert open_it("--output", site / "place").code == 0
    edited = site / "place" / "checkout" / "lockfiles" / "mine.txt"
    edited.write_text("x")
    assert open_it("--output", site / "place").code == 0
    (site / "code" / "new.txt").write_text("x")
    commit(site / "code")
    assert make().code == 0
    other = open_it("--output", site / "place")
    assert (other.error, "is not of this bundle" in other.err) == ("StoreUnwritable", True)
    assert edited.read_text() == "x"


def test_ctrl_c_leaves_nothing_that_looks_whole_and_the_same_command_goes_on(
    site: Path, make: Callable[..., Ended], open_it: Callable[..., Ended]
) -> None:
    code = "import time; from pipeline.app import bundle; from pipeline.cli import main\n"
    code += "def wait(*_):\n    print('waits', flush=True); time.sleep(60)\n"
    code += "bundle.collect_own_tool = wait; main.main()"
    words = ["--checkout", site / "code", "--store", site / "store", "bundle"]
    words += [site / "home" / "plan.yaml", "--output", site / "usb", "--mirror", site / "mirror"]
    command = [sys.executable, "-c", code, *map(str, words)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
    assert not (site / "usb" / MANIFEST).exists()
    assert open_it().code == 10
    assert make().code == 0
    assert open_it().code == 0
