from __future__ import annotations

from pipeline.artifacts.containers.arguments import Mount
from pipeline.serving.recipe.launch import with_whole_repositories
from tests.unit.recipe.render.launches import small_launch

CACHE = "/mnt/models/models--ubergarm--Kimi-K2.6-GGUF"
ARGUMENTS = [
    "-m",
    "/models/IQ3_K/part.gguf",
    "/models",
    '{"model":"/models"}',
    "/models2",
    "a/models",
]


def test_a_snapshot_is_mounted_with_the_files_that_its_links_lead_to() -> None:
    mount = Mount(host=f"{CACHE}/snapshots/abc", inside="/models")
    moved = with_whole_repositories(small_launch(mounts=[mount], arguments=ARGUMENTS))
    assert moved.mounts == [Mount(host=CACHE, inside="/models")]
    assert moved.arguments == [
        "-m",
        "/models/snapshots/abc/IQ3_K/part.gguf",
        "/models/snapshots/abc",
        '{"model":"/models/snapshots/abc"}',
        "/models2",
        "a/models",
    ]


def test_a_folder_below_a_snapshot_is_mounted_with_its_repository_too() -> None:
    mount = Mount(host=f"{CACHE}/snapshots/abc/IQ3_K", inside="/models")
    moved = with_whole_repositories(small_launch(mounts=[mount], arguments=["/models/x.gguf"]))
    assert moved.mounts == [Mount(host=CACHE, inside="/models")]
    assert moved.arguments == ["/models/snapshots/abc/IQ3_K/x.gguf"]


def test_two_models_are_moved_each_by_its_own() -> None:
    mounts = [
        Mount(host="/c/models--a--b/snapshots/1", inside="/models"),
        Mount(host="/c/models--a--draft/snapshots/2", inside="/draft"),
    ]
    moved = with_whole_repositories(small_launch(mounts=mounts, arguments=["/models", "/draft"]))
    assert moved.arguments == ["/models/snapshots/1", "/draft/snapshots/2"]


def test_a_cache_of_another_name_is_known_by_its_commit() -> None:
    commit = "0123456789" * 4
    mount = Mount(host=f"/mnt/kimi/snapshots/{commit}", inside="/models")
    moved = with_whole_repositories(small_launch(mounts=[mount], arguments=["/models/x.gguf"]))
    assert moved.mounts == [Mount(host="/mnt/kimi", inside="/models")]
    assert moved.arguments == [f"/models/snapshots/{commit}/x.gguf"]


def test_a_plain_folder_stays_as_it_is() -> None:
    for host in ("/data/small", CACHE, f"{CACHE}/snapshots", "/x/snapshots/abc"):
        launch = small_launch(mounts=[Mount(host=host, inside="/models")])
        assert with_whole_repositories(launch) == launch
