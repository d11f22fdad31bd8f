from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.artifacts.oci.document import descriptor_json
from pipeline.artifacts.oci.record import LayerRecord, TitledLayer
from pipeline.core.errors import SpecInvalid
from pipeline.core.model import canonical_json, sha256_of
from pipeline.images.assemble.image import (
    image_config,
    image_manifest,
)
from pipeline.images.assemble.plan import ImagePlan
from pipeline.images.lock.model import sealed_lock
from pipeline.images.spec.image import ImageSpec
from tests.makers import AMD64, root_image


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


LAYERS = [
    TitledLayer(
        title=title,
        record=LayerRecord(digest=digest(a), diff_id=digest(b), size_bytes=10, unpacked_bytes=20),
    )
    for title, a, b in (("debs", "a", "b"), ("wheels", "c", "d"))
]

CONFIG = b"{}"


def plan(platform: str = AMD64, base: ImagePlan | None = None, **spec: Any) -> ImagePlan:
    fields: dict[str, Any] = {
        "name": "x",
        "summary": "an image for tests",
        "platforms": [platform],
        **spec,
    }
    if base:
        fields["base"] = base.spec.name
    else:
        fields["debian"] = {}
    image_spec = ImageSpec.model_validate(fields)
    lock = sealed_lock(image_spec.name, platform, image_spec.lock_digest(), None, [], [])
    return ImagePlan(image_spec, platform, lock, (), base, {})


def manifest(image: ImagePlan, layers: list[TitledLayer] = LAYERS) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(image_manifest(image, CONFIG, layers)[0])
    return made


def config(image: ImagePlan) -> dict[str, Any]:
    settings: dict[str, Any] = image_config(image, LAYERS)["config"]
    return settings


ROOT_SPEC = {k: v for k, v in root_image([]).spec.items() if k not in ("platforms", "debian")}
ROOT = plan(**ROOT_SPEC)


def test_the_config_lists_the_layers_in_their_order() -> None:
    made = image_config(plan(), LAYERS)
    assert made["rootfs"] == {"type": "layers", "diff_ids": [digest("b"), digest("d")]}
    assert [h["created_by"] for h in made["history"]] == ["sm120: debs", "sm120: wheels"]
    assert (made["os"], made["architecture"]) == ("linux", "amd64")


def test_nothing_says_when_or_where_it_was_built() -> None:
    made = image_config(plan(), LAYERS)
    times = {made["created"], *(h["created"] for h in made["history"])}
    assert times == {"1980-01-01T00:00:00Z"}
    assert not {"docker_version", "container", "author"} & made.keys()


def test_what_the_spec_says_about_running_is_in_the_config() -> None:
    image = plan(
        entrypoint=["/bin/x"], command=["--help"], ports=[80, 8080], workdir="/srv", env={"A": "1"}
    )
    assert config(image)["Entrypoint"] == ["/bin/x"]
    assert config(image)["Cmd"] == ["--help"]
    assert config(image)["ExposedPorts"] == {"80/tcp": {}, "8080/tcp": {}}
    assert (config(image)["WorkingDir"], config(image)["Env"]) == ("/srv", ["A=1"])


def test_an_image_starts_and_listens_as_its_base_does_where_it_says_nothing() -> None:
    base = plan(**ROOT_SPEC, entrypoint=["/bin/x"], command=["--help"], ports=[80])
    child = config(plan(base=base, ports=[81]))
    assert (child["Entrypoint"], child["Cmd"]) == (["/bin/x"], ["--help"])
    assert child["ExposedPorts"] == {"80/tcp": {}, "81/tcp": {}}
    assert config(plan(base=plan(base=base)))["Entrypoint"] == ["/bin/x"]


def test_an_own_entrypoint_drops_the_bases_command_but_a_command_keeps_its_entrypoint() -> None:
    base = plan(**ROOT_SPEC, entrypoint=["/bin/x"], command=["--help"])
    assert "Cmd" not in config(plan(base=base, entrypoint=["/bin/y"]))
    child = config(plan(base=base, command=["--serve"]))
    assert (child["Entrypoint"], child["Cmd"]) == (["/bin/x"], ["--serve"])


def test_what_the_spec_does_not_say_is_left_out() -> None:
    assert config(plan()).keys() == {"Env", "Labels", "WorkingDir"}


def test_variables_of_the_base_are_there_and_can_be_changed() -> None:
    child = plan(base=ROOT, env={"Z": "1", "PATH": "/x"})
    assert config(child)["Env"] == ["PATH=/x", "Z=1"]


def test_a_user_is_named_by_its_numbers() -> None:
    assert config(plan(**ROOT_SPEC, user="engine"))["User"] == "1000:1000"
    assert config(plan(base=ROOT, user="engine"))["User"] == "1000:1000"


@pytest.mark.parametrize("name", ["root", "nobody", "1000"])
def test_a_user_that_the_root_image_lacks_is_refused(name: str) -> None:
    with pytest.raises(SpecInvalid, match="is not an account"):
        config(plan(**ROOT_SPEC, user=name))


def test_the_manifest_names_config_and_layers() -> None:
    made = manifest(plan())
    assert (made["config"]["digest"], made["config"]["size"]) == (sha256_of(b"{}"), 2)
    assert [(x["digest"], x["size"]) for x in made["layers"]] == [
        (digest("a"), 10),
        (digest("c"), 10),
    ]
    types = {made["mediaType"], made["config"]["mediaType"], made["layers"][0]["mediaType"]}
    assert all(t.startswith("application/vnd.oci.image.") for t in types)


def test_labels_and_annotations_say_the_same() -> None:
    image = plan(labels={"mine": "1"})
    notes = manifest(image)["annotations"]
    assert notes == config(image)["Labels"]
    assert notes["mine"] == "1"
    assert notes["sm120.lock"] == image.lock.seal


def test_the_descriptor_names_platform_and_image() -> None:
    document, descriptor = image_manifest(plan("linux/arm64"), CONFIG, LAYERS)
    made = descriptor_json(descriptor)
    assert (made["digest"], made["size"]) == (sha256_of(document), len(document))
    assert made["platform"] == {"os": "linux", "architecture": "arm64"}
    assert made["annotations"]["org.opencontainers.image.ref.name"] == "x-arm64"


def test_the_order_in_which_a_spec_is_written_does_not_matter() -> None:
    one = plan(env={"A": "1", "B": "2"}, labels={"x": "1", "y": "2"})
    two = plan(env={"B": "2", "A": "1"}, labels={"y": "2", "x": "1"})
    assert canonical_json(image_config(one, LAYERS)) == canonical_json(image_config(two, LAYERS))


@pytest.mark.parametrize(
    "change",
    [{"env": {"A": "1"}}, {"command": ["x"]}, {"summary": "another image"}, {"ports": [1]}],
)
def test_what_the_spec_changes_shows_in_the_config(change: dict[str, Any]) -> None:
    assert image_config(plan(**change), LAYERS) != image_config(plan(), LAYERS)


def test_other_layers_show_in_config_and_manifest() -> None:
    assert image_config(plan(), LAYERS[::-1]) != image_config(plan(), LAYERS)
    assert manifest(plan(), LAYERS[:1]) != manifest(plan())
