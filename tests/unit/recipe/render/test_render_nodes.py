"""An engine over several nodes, in every format that can have it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from pipeline.core.errors import RecipeInvalid
from pipeline.serving.recipe.container import LaunchTarget
from pipeline.serving.recipe.launch import Launch, NodePlace, on_node
from pipeline.serving.recipe.render.formats import render_launch
from tests.unit.recipe.render.launches import DIGEST, IMAGE, TARGET, small_launch

RDMA = LaunchTarget(image=IMAGE, rdma=True)
PYXIS = LaunchTarget(image=IMAGE, runner="pyxis")


def of_rank(rank: int, **changes: Any) -> Launch:
    launch = small_launch(nodes=2, **changes)
    return on_node(launch, NodePlace(rank, "10.0.0.1", f"10.0.0.{rank + 1}"))


@pytest.mark.parametrize(
    ("format_name", "line", "never"),
    [
        ("docker", "  --network=host \\", "-p 127"),
        ("podman", "  --network=host \\", "-p 127"),
        ("systemd", "  --network=host \\", "-p 127"),
        ("quadlet", "Network=host", "PublishPort"),
        ("compose", "    network_mode: host", "ports:"),
    ],
)
def test_ranks_have_the_network_of_their_host_and_clients_that_of_the_first_alone(
    format_name: str, line: str, never: str
) -> None:
    texts = [render_launch(of_rank(rank), TARGET, format_name) for rank in (0, 1)]
    for text in texts:
        assert line in text.splitlines()
        assert never not in text
    assert "--host" in texts[0]
    assert "--host" not in texts[1]
    assert "--headless" in texts[1]


def test_other_machines_reach_the_first_rank_where_that_is_asked_for() -> None:
    target = TARGET.model_copy(update={"lan": True})
    assert "--host 0.0.0.0" in render_launch(of_rank(0), target, "docker")
    assert "--host 127.0.0.1" in render_launch(of_rank(0), TARGET, "docker")


def test_a_worker_of_sglang_answers_its_own_machine_alone() -> None:
    text = render_launch(of_rank(1, engine="sglang"), TARGET, "docker")
    assert text.endswith("--host 127.0.0.1\n")


@pytest.mark.parametrize(
    ("format_name", "line"),
    [
        ("docker", "  --device /dev/infiniband \\"),
        ("quadlet", "AddDevice=/dev/infiniband"),
        ("compose", "    - /dev/infiniband"),
    ],
)
def test_rdma_devices_are_given_where_they_are_asked_for(format_name: str, line: str) -> None:
    assert line in render_launch(of_rank(0), RDMA, format_name).splitlines()
    assert "infiniband" not in render_launch(of_rank(0), TARGET, format_name)


@pytest.mark.parametrize("format_name", ["docker", "compose"])
def test_rdma_devices_that_nccl_is_told_to_leave_alone_are_refused(format_name: str) -> None:
    launch = of_rank(0, environment={"NCCL_IB_DISABLE": "1"})
    with pytest.raises(RecipeInvalid, match="sets NCCL_IB_DISABLE=1"):
        render_launch(launch, RDMA, format_name)


def test_kubernetes_has_no_ranks_that_start_together() -> None:
    with pytest.raises(RecipeInvalid, match="must start and end together") as caught:
        render_launch(small_launch(nodes=2), TARGET, "kubernetes")
    assert "LeaderWorkerSet" in caught.value.hint


def test_a_compose_file_of_a_rank_is_one_that_compose_reads() -> None:
    body = yaml.safe_load(render_launch(of_rank(1), RDMA, "compose"))
    engine = body["services"]["engine"]
    assert engine["command"][-1] == "--headless"
    assert engine["environment"]["VLLM_HOST_IP"] == "10.0.0.2"


def test_a_slurm_job_asks_for_whole_nodes_and_nothing_of_the_callers_environment() -> None:
    lines = render_launch(small_launch(nodes=2), TARGET, "slurm").splitlines()
    asked = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
    assert asked == [
        *("--job-name=sm120-small-2x", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2"),
        *("--exclusive", "--mem=0", "--no-requeue", "--export=NONE"),
        "--output=sm120-small-2x-%j.log",
    ]
    assert 'srun --label --kill-on-bad-exit=1 --wait=30 bash -c "$rank"' in lines
    assert f"srun --kill-on-bad-exit=1 podman pull --quiet {IMAGE}" in lines


def test_pyxis_takes_the_image_by_its_digest() -> None:
    text = render_launch(small_launch(nodes=2), PYXIS, "slurm")
    assert f"--container-image=registry.example#engines/vllm:{DIGEST}" in text
    assert "--container-mounts=/data/small:/models:ro" in text
    assert "podman" not in text


def test_a_job_of_pyxis_on_one_node_answers_that_node_alone() -> None:
    text = render_launch(small_launch(), PYXIS, "slurm")
    assert "  --host 127.0.0.1\nfi\n" in text
    assert "--nnodes" not in text


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (LaunchTarget(image="sm120/vllm:0123456789ab", runner="pyxis"), "from a registry"),
        (LaunchTarget(image=IMAGE, gpus=[0, 1]), "Slurm chooses the GPUs itself"),
    ],
)
def test_what_a_slurm_job_cannot_have_is_refused(target: LaunchTarget, message: str) -> None:
    with pytest.raises(RecipeInvalid, match=message):
        render_launch(small_launch(nodes=2), target, "slurm")
