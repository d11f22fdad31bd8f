"""Compiled layers through a registry: from who compiled them to an empty store."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.attest.envelope import Envelope, enclose, read_envelope
from pipeline.artifacts.attest.keys import Signer, find_signer
from pipeline.artifacts.attest.names import OBJECTS
from pipeline.artifacts.attest.statement import subject
from pipeline.artifacts.oci.document import Descriptor, descriptor_json
from pipeline.artifacts.store.store import default_root
from pipeline.core.model import canonical_json, sha256_of
from pipeline.core.net.timing import RetryPolicy
from pipeline.evidence.publish.attachment import attach
from pipeline.evidence.publish.evidence import EvidenceBundle, statements_of
from tests.testbed.oci_door import Door, cut_answer, status
from tests.testbed.tiny_registry import TinyRegistry
from tests.unit.cli.test_compiled_commands import Desk
from tests.unit.registry.support import repository_at
from tests.unit.support import AMD64, Command, Ended, temporary_files

REPO = "team/layers"
Json = dict[str, Any]


class Site(Desk):
    """A desk beside a registry, with a key of its own."""

    digest = ""

    def __init__(
        self, place: Path, sm120: Command, monkeypatch: pytest.MonkeyPatch, tiny: TinyRegistry
    ) -> None:
        super().__init__(place, sm120, monkeypatch)
        self.tiny, self.compiled = tiny, 0
        self._published: tuple[Any, Any] | None = None
        make = self.backend.make

        def counted(source: Path) -> dict[str, bytes]:
            self.compiled += 1
            return make(source)

        self.backend.make = counted

    def reset(self) -> None:
        """The registry as it was after publishing."""
        if not self._published:
            self._published = (dict(self.tiny.manifests), dict(self.tiny.tags))
        manifests, tags = self._published
        self.tiny.manifests, self.tiny.tags = dict(manifests), dict(tags)

    def publish(self, at: str, build: str = "plain", *words: str) -> Ended:
        return self("source", "publish", "hello", build, at, "--platform", AMD64, *words)

    def take(self, at: str, *words: str) -> Ended:
        mirror = ("--mirror", str(self.place / "mirror"))
        return self("build", "engine", "--layers-from", at, *mirror, *words)

    def tag_of(self, build: str) -> str:
        return next(tag for _, tag in self.tiny.tags if tag.startswith(f"hello-{build}-amd64-"))

    def manifest(self, build: str = "plain") -> Json:
        digest = self.tiny.tags[REPO, self.tag_of(build)]
        return dict(json.loads(self.tiny.manifests[REPO, digest][1]))

    def statements(self, build: str = "plain") -> list[tuple[str, Envelope]]:
        """The envelopes that are attached to a layer, each with the digest of its manifest."""
        subject, found = self.tiny.tags[REPO, self.tag_of(build)], []
        for (_, digest), (_, data) in self.tiny.manifests.items():
            manifest = json.loads(data)
            if manifest.get("subject", {}).get("digest") == subject:
                blob = self.tiny.blobs[REPO, manifest["layers"][0]["digest"]]
                found.append((digest, read_envelope(blob, digest)))
        return found

    def restate(self, door: Door, change: Callable[[Envelope], Envelope]) -> None:
        """Put another envelope in the place of the one that was published."""
        repository = repository_at(door, REPO)
        document = repository.manifest(self.tag_of("plain"))
        ((digest, envelope),) = self.statements()
        del self.tiny.manifests[REPO, digest]
        attach(repository, document, statements_of(EvidenceBundle({"": [change(envelope)]})))

    def renamed(self, change: Callable[[Json], object]) -> None:
        """Let the tag name a changed manifest, to which the old statement is attached again."""
        manifest = self.manifest()
        change(manifest)
        data = canonical_json(manifest)
        before, new = self.tiny.tags[REPO, self.tag_of("plain")], sha256_of(data)
        self.tiny.manifests[REPO, new] = (manifest["mediaType"], data)
        self.tiny.tags[REPO, self.tag_of("plain")] = new
        for (_, digest), (kind, attached) in list(self.tiny.manifests.items()):
            value = json.loads(attached)
            if value.get("subject", {}).get("digest") == before:
                value["subject"] |= {"digest": new, "size": len(data)}
                moved = canonical_json(value)
                del self.tiny.manifests[REPO, digest]
                self.tiny.manifests[REPO, sha256_of(moved)] = (kind, moved)


@pytest.fixture
def site(
    tmp_path: Path, sm120: Command, monkeypatch: pytest.MonkeyPatch, tiny: TinyRegistry
) -> Site:
    """Both trees compiled and the image accepted; the user has a key."""
    monkeypatch.setattr(RetryPolicy, "pause", lambda *_: None)
    site = Site(tmp_path, sm120, monkeypatch, tiny)
    assert site.offline("build", "tools", "--accept").code == 0
    site.digest = site.build()
    assert sm120("evidence", "new-key", "ann").code == 0
    return site


@pytest.fixture
def at(door: Door) -> str:
    return f"{door.host_port}/{REPO}"


@pytest.fixture
def published(site: Site, at: str, door: Door) -> Site:
    """Both layers in the registry, and a machine with an empty store that shares the key."""
    for build in ("plain", "other"):
        assert site.publish(at, build).code == 0
    shutil.rmtree(default_root())
    site.compiled = 0
    site.reset()
    door.asked.clear()
    return site


def kept(store: Path) -> list[Path]:
    """What a refused layer must not leave."""
    folders = ("trees", "layers", "partial", "contents")
    return [x for name in folders for x in (store / name).glob("*") if x.suffix != ".lock"]


def require_refused(site: Site, ended: Ended, error: str, code: int, *words: str) -> None:
    assert (ended.error, ended.code) == (error, code), ended.err
    for word in words:
        assert word in ended.err
    line = next(x for x in ended.err.splitlines() if x.startswith("sm120: "))
    assert "Traceback" not in ended.err
    assert len(line) < 700
    assert site.compiled == 0
    assert kept(default_root()) == []
    assert temporary_files(default_root()) == []


def test_a_layer_that_another_machine_compiled_is_taken_and_gives_the_same_image(
    published: Site, at: str, door: Door
) -> None:
    done = published.take(at, "--json")
    assert done.json[0]["digest"] == published.digest
    assert published.compiled == 0
    layer = published.manifest()["layers"][0]["digest"]
    assert [x.path for x in door.asked if layer in x.path] == [f"/v2/{REPO}/blobs/{layer}"]
    assert "Fetching hello (plain), " in done.err
    # no toolchain is needed for it
    assert not (default_root() / "images" / "tools").exists()
    walked = published("verify", "engine")
    assert "compiled on another machine, by a statement that sha256:" in walked.out
    assert "broken" not in walked.out + walked.err
    asked = len(door.asked)
    assert published.take(at, "--json").json[0]["cached"] is True
    assert len(door.asked) == asked


def test_a_taken_layer_is_rebuilt_from_source_and_identical(published: Site, at: str) -> None:
    assert published.take(at).code == 0
    assert published.offline("image", "rebuild", "engine", "--json").json["identical"] is True
    assert published.compiled > 0
    shown = published("source", "build", "hello", "plain", "--platform", AMD64)
    assert "compiled by" in shown.out


def test_nobody_is_asked_without_a_name_of_a_registry_or_with_nothing_to_compile(
    published: Site, at: str, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = published.take(at, "--offline")
    assert ended.code == 0, ended.err
    assert f"{at} is not asked for layers: --offline" in ended.err
    assert published.compiled > 0
    assert published.take(at).code == 0
    assert door.asked == []
    shutil.rmtree(default_root())
    assert published("plan", "engine").code == 0
    monkeypatch.setenv("SM120_LAYERS_FROM", "")
    assert published.offline("build", "engine").code == 0
    assert door.asked == []
    shutil.rmtree(default_root())
    monkeypatch.setenv("SM120_LAYERS_FROM", at)
    assert "to take from" in published("plan", "engine").out


@pytest.mark.parametrize("words", [("plan", "engine"), ("build", "engine", "--dry-run")])
def test_a_plan_says_what_would_be_taken_and_fetches_no_layer(
    published: Site, at: str, door: Door, words: tuple[str, ...]
) -> None:
    plan = published(*words, "--layers-from", at, "--json").json
    layers = [published.manifest(build)["layers"][0] for build in ("plain", "other")]
    assert [row["digest"] for row in plan["take"]] == [x["digest"] for x in layers]
    assert [row["size_bytes"] for row in plan["take"]] == [x["size"] for x in layers]
    assert {tuple(row["signed_by"]) for row in plan["take"]} == {("ann",)}
    assert (plan["compile"], plan["fetch_files"]) == ([], 1), "only the package of its base"
    text = published(*words, "--layers-from", at).out
    assert f"to take from {at}, signed by ann" in text
    assert "of compiled layers; disk needed" in text
    assert not any(x["digest"] in request.path for request in door.asked for x in layers)
    assert not default_root().exists()


def test_all_images_include_those_whose_layers_can_be_taken(published: Site, at: str) -> None:
    mirror = ("--mirror", str(published.place / "mirror"))
    rows = published("build", "--layers-from", at, *mirror, "--accept", "--json").json
    assert "engine" in [row["image"] for row in rows]
    assert published.compiled == 0


def test_what_no_registry_has_is_compiled_and_said(published: Site, at: str) -> None:
    elsewhere = at.replace("layers", "other")
    ended = published.take(elsewhere)
    assert ended.code == 0, ended.err
    assert f"hello (plain): {elsewhere} has no layer of it, so it is compiled" in ended.err
    assert published.compiled > 0


def test_a_changed_patch_is_another_tree_which_is_compiled(published: Site, at: str) -> None:
    (published.checkout.source_folder("hello") / "config.h").write_text("#define X 2\n")
    ended = published.take(at, "--accept")
    assert ended.code == 0, ended.err
    assert f"hello (plain): {at} has no layer of it" in ended.err
    assert published.compiled > 0


def test_a_dead_registry_costs_only_the_time_to_compile(published: Site) -> None:
    ended = published.take("127.0.0.1:9/team/layers")
    assert ended.code == 0, ended.err
    assert "hello (plain), hello (other): compiled, as no layer can be looked for: " in ended.err
    assert published.compiled > 0


@pytest.mark.parametrize("fault", [status(503), cut_answer(10), status(404)])
def test_a_registry_that_dies_on_the_way_or_lost_the_blob_costs_only_that_time(
    published: Site, at: str, door: Door, fault: Any
) -> None:
    layer = published.manifest()["layers"][0]["digest"]
    door.fail("GET", f"/blobs/{layer}", fault, times=100)
    ended = published.take(at)
    assert ended.code == 0, ended.err
    assert "hello (plain) is compiled instead: " in ended.err
    assert published.compiled > 0


def test_publishing_again_sends_nothing_and_states_nothing_new(site: Site, at: str) -> None:
    dry = site.publish(at, "plain", "--dry-run", "--json").json
    assert (dry["dry_run"], site.tiny.manifests) == (True, {})
    first = site.publish(at, "plain", "--json").json
    assert first["sent_bytes"] == dry["sent_bytes"] > 0
    before = set(site.tiny.manifests)
    again = site.publish(at, "plain", "--json").json
    assert (again["sent_bytes"], again["reference"]) == (0, first["reference"])
    assert set(site.tiny.manifests) == before
    assert "nothing was sent" in site.publish(at, "plain", "--dry-run").out
    # the statement is no leftover
    site("store", "trim")
    site.publish(at)
    assert set(site.tiny.manifests) == before


def test_two_who_compiled_it_sign_one_manifest_and_either_is_enough(
    published: Site, at: str, door: Door
) -> None:
    theirs = published.place / "theirs"
    published("evidence", "new-key", "bob", "--output", str(theirs))
    published.offline("build", "engine")
    published.publish(at, "plain", "--key", str(theirs / "bob.pem"))
    assert len(published.statements()) == 2
    shutil.rmtree(default_root())
    published.compiled = 0
    assert published.take(at).code == 0
    assert published.compiled == 0


def test_a_tree_that_is_not_compiled_or_not_here_is_not_published(
    published: Site, at: str, door: Door
) -> None:
    ended = published.publish(at)
    assert (ended.error, ended.code) == ("UnknownSource", 41)
    assert "`sm120 source build hello plain` does it." in ended.err
    assert published.take(at).code == 0
    door.asked.clear()
    ended = published.publish(at)
    assert (ended.error, ended.code) == ("PublishRefused", 76)
    assert "hello (plain) was compiled on another machine" in ended.err
    assert not any(request.method != "GET" for request in door.asked)


def test_a_tree_is_not_published_without_a_key_or_against_the_golden_digest(
    site: Site, at: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    golden = site.checkout.golden_path
    text = golden.read_text()
    golden.write_text(_other_layer(text))
    ended = site.publish(at)
    assert (ended.error, ended.code) == ("GoldenMismatch", 32)
    golden.write_text(text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "nobody"))
    for words in ((), ("--dry-run",)):
        ended = site.publish(at, "plain", *words)
        assert (ended.error, ended.code) == ("SigningFailed", 70)
    assert site.publish(f"{at}:v1").error == "ReferenceInvalid"
    assert site.tiny.manifests == {}


def _other_layer(golden: str) -> str:
    """A golden file in which the layer of a tree has another digest."""
    title = "hello (plain): sha256:"
    start = golden.index(title) + len(title)
    return f"{golden[:start]}{'0' * 64}{golden[start + 64 :]}"


def signer_of(site: Site, name: str = "") -> Signer:
    """The user's key, or one of somebody else's."""
    path = site.place / "theirs" / f"{name}.pem" if name else None
    if path and not path.exists():
        site("evidence", "new-key", name, "--output", str(path.parent))
    found = find_signer(path, os.environ)
    assert found is not None
    return found


def signed_anew(site: Site, change: Callable[[Json], object]) -> Callable[[Envelope], Envelope]:
    """Somebody with a trusted key signed something else."""

    def restate(envelope: Envelope) -> Envelope:
        predicate = json.loads(json.dumps(envelope.statement.predicate))
        change(predicate)
        statement = envelope.statement.model_copy(update={"predicate": predicate})
        return enclose(statement, [signer_of(site)])

    return restate


def test_nobody_takes_an_unsigned_layer_or_one_without_a_statement(
    published: Site, at: str, door: Door
) -> None:
    published.restate(door, lambda envelope: replace(envelope, signatures=()))
    ended = published.take(at)
    require_refused(published, ended, "LayerRefused", 71, "nobody signed it")
    ((digest, _),) = published.statements()
    del published.tiny.manifests[REPO, digest]
    ended = published.take(at)
    require_refused(published, ended, "LayerRefused", 71, "nobody signed it")


def test_a_key_that_nobody_trusts_is_refused_and_the_hint_says_how_to_trust_it(
    published: Site, at: str, door: Door
) -> None:
    stranger = signer_of(published, "eve")
    published.restate(door, lambda envelope: enclose(envelope.statement, [stranger]))
    ended = published.take(at)
    words = ("only your own keys are trusted here", "`sm120 evidence trust-key FILE.pub`")
    require_refused(published, ended, "LayerRefused", 71, *words)
    # a plan says the same, before anything is built
    assert published("plan", "engine", "--layers-from", at).error == "LayerRefused"
    public = str(published.place / "theirs" / "eve.pub")
    assert published("evidence", "trust-key", public).code == 0
    assert published.take(at).code == 0
    assert published.compiled == 0


def test_a_key_that_the_trust_file_does_not_let_sign_layers_is_refused(
    published: Site, at: str
) -> None:
    rows = published("evidence", "list-keys", "--json").json
    mine = published("evidence", "show-key", next(x["in"] for x in rows if x["name"] == "ann")).out
    signer_of(published, "eve")
    theirs = published("evidence", "show-key", str(published.place / "theirs" / "eve.pub")).out
    stolen = "revoked: {since: 2020-01-01T00:00:00Z, reason: was stolen, compromised: true}"
    trust = published.place / "trust.yaml"
    for entry, why in {
        theirs: "a key that the trust file does not know",
        re.sub("for: .*", "for: [objects, provenance]", mine): "not trusted for compiled-tree",
        f"{mine}  {stolen}\n": "the key ann is revoked: was stolen",
        re.sub("(not_before|until): .{4}", _in_2020, mine): "made after the key ann expired (2021",
    }.items():
        trust.write_text(f"format: 1\nkeys:\n{entry}")
        ended = published.take(at, "--trust", str(trust))
        require_refused(published, ended, "LayerRefused", 71, why)
    trust.write_text(f"format: 1\nkeys:\n{mine}")
    assert published.take(at, "--trust", str(trust)).code == 0


def _in_2020(found: re.Match[str]) -> str:
    return f"{found[1]}: {'2020' if found[1] == 'not_before' else '2021'}"


def test_a_signature_over_other_bytes_is_refused(published: Site, at: str, door: Door) -> None:
    def spoil(envelope: Envelope) -> Envelope:
        (signature,) = envelope.signatures
        sig = signature.sig[:-1] + bytes([signature.sig[-1] ^ 1])
        return replace(envelope, signatures=(replace(signature, sig=sig),))

    published.restate(door, spoil)
    ended = published.take(at)
    require_refused(published, ended, "LayerRefused", 71, "signature of ann is not over these")


# each is signed by a trusted key, and wrong
FALSE_STATEMENTS: list[tuple[Callable[[Json], object], str]] = [
    (lambda x: x["inputs"].update(toolchain=f"sha256:{'0' * 64}"), "toolchain differ"),
    (lambda x: x["inputs"].update(tree=f"sha256:{'0' * 64}"), "another tree: tree differ"),
    (lambda x: x["inputs"]["own"].pop(), "another tree: own differ"),
    (lambda x: x["inputs"].update(platform="linux/arm64"), "another tree: platform differ"),
    (lambda x: x["tree"].update(platform="linux/arm64"), "hello (plain) for linux/arm64"),
    (lambda x: x["tree"].update(build="other"), "was signed as hello (other)"),
    (lambda x: x["tree"].update(key=f"sha256:{'0' * 64}"), "was signed as hello (plain)"),
    (lambda x: x["tree"].update(layer=f"sha256:{'0' * 64}"), "two different layers"),
    (lambda x: x["tree"].update(toolchain=f"sha256:{'0' * 64}"), "the golden toolchain is"),
    (lambda x: x["record"].update(size_bytes=7), "the tag names sha256:"),
    (lambda x: x.pop("inputs"), "its statement: inputs: Field required"),
    (lambda x: x.update(more=1), "its statement: more: "),
    (lambda x: x["sm120_recorded"].update(at="2999-01-01T00:00:00Z"), "in the future"),
    (
        lambda x: x["tree"].update(
            taken={"statement": f"sha256:{'0' * 64}", "signed_by": [f"sha256:{'0' * 64}"]}
        ),
        "its signer did not compile it",
    ),
]


def test_a_signed_statement_of_another_tree_is_refused(
    published: Site, at: str, door: Door
) -> None:
    for change, why in FALSE_STATEMENTS:
        published.reset()
        published.restate(door, signed_anew(published, change))
        require_refused(published, published.take(at), "LayerRefused", 71, why)
    published.reset()
    assert published.take(at).code == 0, "as it was published it is taken"


def test_a_statement_of_another_kind_is_refused(published: Site, at: str, door: Door) -> None:
    def as_objects(envelope: Envelope) -> Envelope:
        other = envelope.statement.model_copy(update={"predicate_type": OBJECTS})
        return enclose(other, [signer_of(published)])

    published.restate(door, as_objects)
    ended = published.take(at)
    require_refused(published, ended, "LayerRefused", 71, "is not about a compiled tree")


def test_a_tag_that_was_moved_to_another_signed_layer_is_refused(published: Site, at: str) -> None:
    tags = published.tiny.tags
    tags[REPO, published.tag_of("plain")] = tags[REPO, published.tag_of("other")]
    ended = published.take(at)
    require_refused(published, ended, "LayerRefused", 71, "was signed for another tree: build")


FALSE_MANIFESTS: list[tuple[Callable[[Json], object], str]] = [
    (lambda x: x["layers"][0].update(digest=f"sha256:{'0' * 64}"), "the tag names sha256:000"),
    (lambda x: x["layers"][0].update(size=7), "the tag names sha256:"),
    (lambda x: x["layers"].append(x["layers"][0]), "is not the layer of a compiled tree"),
    (lambda x: x["layers"].clear(), "is not the layer of a compiled tree"),
]


def test_a_manifest_that_names_another_layer_is_refused(published: Site, at: str) -> None:
    for change, why in FALSE_MANIFESTS:
        published.reset()
        published.renamed(change)
        require_refused(published, published.take(at), "LayerRefused", 71, why)


def test_a_blob_that_was_cut_short_or_replaced_is_refused(published: Site, at: str) -> None:
    layer = published.manifest()["layers"][0]
    size = int(layer["size"])
    for data, why in {
        b"": f"has 0 bytes instead of {size}",
        b"cut": f"has 3 bytes instead of {size}",
        b"x" * (size + 1): f"has {size + 1} bytes instead of {size}",
        b"x" * size: "received sha256:",
    }.items():
        published.tiny.blobs[REPO, layer["digest"]] = data
        require_refused(published, published.take(at), "RegistryBroken", 21, why)


def test_a_registry_that_refuses_is_no_reason_to_compile_for_hours(
    published: Site, at: str, door: Door
) -> None:
    door.fail("GET", "/manifests/", status(403), times=10)
    require_refused(published, published.take(at), "RegistryRefused", 23, "refused with 403")


def _tar(files: dict[str, tuple[bytes, int]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, (data, mode) in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), mode
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


GOOD = {"opt/hello/bin/hello": (b"program", 0o755), "opt/hello/notes": (b"notes", 0o644)}


FALSE_LAYERS = {
    _tar({**GOOD, "etc/shadow": (b"root::", 0o644)}): "holds more than the files of this tree",
    _tar({**GOOD, "opt/hello/bin/hello": (b"program", 0o4755)}): "holds more than the files of",
    _tar({"opt/hello/notes": (b"notes", 0o644)}): "holds no hello",
    _tar(GOOD)[:60]: "is no layer that can be read",
    b"no archive at all": "is no layer that can be read",
}


def test_a_signed_layer_of_other_files_is_refused_also_where_no_golden_digest_is_known(
    published: Site, at: str, door: Door
) -> None:
    golden = published.checkout.golden_path
    # as of an image that nobody built yet
    golden.write_text(golden.read_text().replace("compiled:", "before:"))
    for data, why in FALSE_LAYERS.items():
        published.reset()
        digest = sha256_of(data)
        blob = Descriptor(media_type="a/b", digest=digest, size_bytes=len(data))
        published.tiny.blobs[REPO, digest] = data

        def swap(envelope: Envelope, new: Descriptor = blob) -> Envelope:
            statement = envelope.statement
            predicate = json.loads(json.dumps(statement.predicate))
            predicate["tree"]["layer"] = new.digest
            predicate["record"] |= {"digest": new.digest, "size_bytes": new.size_bytes}
            about = [subject(statement.subject[0].name, new.digest)]
            changes = {"predicate": predicate, "subject": about}
            return enclose(statement.model_copy(update=changes), [signer_of(published)])

        def name_it(manifest: Json, new: Descriptor = blob) -> None:
            manifest["layers"] = [descriptor_json(new)]

        published.renamed(name_it)
        published.restate(door, swap)
        require_refused(published, published.take(at), "LayerRefused", 71, why)


def test_a_signed_layer_that_is_not_the_golden_one_is_refused(published: Site, at: str) -> None:
    golden = published.checkout.golden_path
    golden.write_text(_other_layer(golden.read_text()))
    ended = published.take(at)
    words = ("the layer is sha256:", "and the golden digest of engine.amd64 has sha256:000")
    require_refused(published, ended, "LayerRefused", 71, *words)
