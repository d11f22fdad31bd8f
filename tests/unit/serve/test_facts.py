from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.artifacts.containers.facts import ContainerFacts, ImageFacts, difference, require_same
from pipeline.core.errors import ImageDiffers
from tests.unit.serve.fake_engine import RECORD, digest

LAYERS = [digest("1"), digest("2")]


@pytest.mark.parametrize("identity", [digest("c"), digest("d")])
def test_the_built_image_is_recognised_by_its_config_or_its_manifest(identity: str) -> None:
    assert difference(RECORD, ImageFacts(id=identity, layers=LAYERS)) == ""


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (None, "gone"),
        (ImageFacts(id=digest("e"), layers=LAYERS), "its image is sha256:eee"),
        (ImageFacts(id=digest("c"), layers=LAYERS[:1]), "1 layers, built were 2"),
        (ImageFacts(id=digest("c"), layers=[]), "0 layers"),
        (ImageFacts(id=digest("c"), layers=[*LAYERS, digest("3")]), "3 layers"),
        (ImageFacts(id=digest("c"), layers=LAYERS[::-1]), "layer 1 is sha256:222"),
        (ImageFacts(id=digest("c"), layers=[LAYERS[0], digest("9")]), "layer 2 is sha256:999"),
    ],
)
def test_any_other_image_is_refused(image: ImageFacts | None, reason: str) -> None:
    with pytest.raises(ImageDiffers, match=reason):
        require_same("tiny-cpu", RECORD, image)


def answer(**state: Any) -> dict[str, Any]:
    return {
        "Id": "22f00e56",
        "Name": "/sm120-tiny-cpu",
        "Image": digest("c"),
        "State": {"Status": "running", "Running": True, "ExitCode": 0, **state},
        "Config": {"Labels": {"sm120.recipe": "tiny-cpu"}, "Image": "x"},
        "Driver": "overlay2",
    }


def test_docker_and_podman_are_read_alike() -> None:
    docker = ContainerFacts.model_validate(
        answer(OOMKilled=False, StartedAt="2026-11-16T07:15:35Z")
    )
    podman = ContainerFacts.model_validate(
        {**answer(StartedAt="2026-11-16T07:15:35Z"), "Image": "c" * 64}
    )
    assert docker == podman
    assert docker.name == "sm120-tiny-cpu"


def test_a_container_without_labels_has_none() -> None:
    assert ContainerFacts.model_validate({**answer(), "Config": {"Labels": None}}).labels == {}


@pytest.mark.parametrize("missing", ["Id", "State", "Image"])
def test_an_answer_that_lacks_something_is_no_answer(missing: str) -> None:
    with pytest.raises(ValidationError):
        ContainerFacts.model_validate({k: v for k, v in answer().items() if k != missing})


def test_an_image_without_layers_is_read_as_one() -> None:
    assert ImageFacts.model_validate({"Id": "a" * 64, "RootFS": {"Type": "layers"}}).layers == []
