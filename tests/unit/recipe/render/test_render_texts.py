from __future__ import annotations

import shlex
import textwrap
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from pipeline.artifacts.containers.arguments import Mount
from pipeline.core.errors import RecipeInvalid
from pipeline.serving.recipe.container import LaunchTarget, UnitSettings, container_arguments
from pipeline.serving.recipe.model import ContainerSpec
from pipeline.serving.recipe.render.formats import CONTAINED, render_launch
from tests.unit.recipe.render.launches import DIGEST, IMAGE, TARGET, small_launch

LOCAL = LaunchTarget(image="sm120/vllm:0123456789ab")
NCCL = LaunchTarget(image=IMAGE, nccl="patched")


def text(body: str) -> str:
    return textwrap.dedent(body).lstrip("\n").replace("IMAGE", IMAGE)


def engine_of(target: LaunchTarget = TARGET, **changes: Any) -> dict[str, Any]:
    """The engine's service in a Compose file."""
    body: Any = yaml.safe_load(render_launch(small_launch(**changes), target, "compose"))
    service: dict[str, Any] = body["services"]["engine"]
    return service


def pod_of(target: LaunchTarget = TARGET, **changes: Any) -> dict[str, Any]:
    """The pod of a Deployment."""
    deployment, _ = yaml.safe_load_all(render_launch(small_launch(**changes), target, "kubernetes"))
    pod: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return pod


def test_docker() -> None:
    assert render_launch(small_launch(), TARGET, "docker") == text(r"""
        docker run --rm \
          --device nvidia.com/gpu=all \
          -p 127.0.0.1:8000:8000 \
          --cap-drop=ALL \
          --security-opt=no-new-privileges \
          --cap-add=SYS_NICE \
          --ipc=host \
          --ulimit=memlock=-1:-1 \
          -e NCCL_P2P_LEVEL=SYS \
          -v /data/small:/models:ro \
          -v sm120-small-2x-0123456789ab:/home/engine \
          IMAGE \
          /models \
          --served-model-name small \
          --port 8000
        """)


def test_podman_relabels_the_weights_and_gives_the_cache_to_the_engine() -> None:
    docker = render_launch(small_launch(), TARGET, "docker")
    want = docker.replace("docker run", "podman run")
    want = want.replace(":/models:ro", ":/models:ro,Z").replace(":/home/engine", ":/home/engine:U")
    assert render_launch(small_launch(), TARGET, "podman") == want


def test_quadlet() -> None:
    assert render_launch(small_launch(), TARGET, "quadlet") == text(r"""
        # sm120-small-2x.container: into /etc/containers/systemd, or ~/.config/containers/systemd;
        # then `systemctl daemon-reload` and `systemctl start sm120-small-2x`.
        [Unit]
        Description=small by vllm

        [Container]
        ContainerName=sm120-small-2x
        Image=IMAGE
        AddDevice=nvidia.com/gpu=all
        PublishPort=127.0.0.1:8000:8000
        DropCapability=all
        NoNewPrivileges=true
        AddCapability=SYS_NICE
        Environment=NCCL_P2P_LEVEL=SYS
        Volume=/data/small:/models:ro,Z
        Volume=sm120-small-2x-0123456789ab:/home/engine:U
        PodmanArgs=--ipc=host
        PodmanArgs=--ulimit=memlock=-1:-1
        Exec=/models \
          --served-model-name small \
          --port 8000

        [Service]
        Restart=on-failure
        RestartSec=10
        TimeoutStartSec=infinity

        [Install]
        WantedBy=multi-user.target default.target
        """)


def test_systemd() -> None:
    assert render_launch(small_launch(), TARGET, "systemd") == text(r"""
        # sm120-small-2x.service: into /etc/systemd/system;
        # then `systemctl daemon-reload` and `systemctl enable --now sm120-small-2x`.
        [Unit]
        Description=small by vllm
        After=network-online.target docker.service
        Wants=network-online.target
        Requires=docker.service

        [Service]
        ExecStartPre=-/usr/bin/docker rm --force sm120-small-2x
        ExecStart=/usr/bin/docker run --rm --name sm120-small-2x \
          --device nvidia.com/gpu=all \
          -p 127.0.0.1:8000:8000 \
          --cap-drop=ALL \
          --security-opt=no-new-privileges \
          --cap-add=SYS_NICE \
          --ipc=host \
          --ulimit=memlock=-1:-1 \
          -e NCCL_P2P_LEVEL=SYS \
          -v /data/small:/models:ro \
          -v sm120-small-2x-0123456789ab:/home/engine \
          IMAGE \
          /models \
          --served-model-name small \
          --port 8000
        ExecStop=/usr/bin/docker stop sm120-small-2x
        SuccessExitStatus=143
        Restart=on-failure
        RestartSec=10
        TimeoutStartSec=infinity

        [Install]
        WantedBy=multi-user.target
        """)


@pytest.mark.parametrize("format_name", ["docker", "podman", "quadlet", "systemd", "compose"])
def test_other_machines_connect_where_that_is_asked_for(format_name: str) -> None:
    alone, lan = TARGET, LaunchTarget(image=IMAGE, lan=True)
    assert "127.0.0.1:8000:8000" in render_launch(small_launch(), alone, format_name)
    assert "127.0.0.1" not in render_launch(small_launch(), lan, format_name)
    assert "8000:8000" in render_launch(small_launch(), lan, format_name)


@pytest.mark.parametrize("format_name", ["docker", "podman"])
def test_a_rendered_command_has_the_rights_and_the_address_of_a_served_one(
    format_name: str,
) -> None:
    served = container_arguments(small_launch(), image=IMAGE).run_flags()
    flags = shlex.split(render_launch(small_launch(), TARGET, format_name).replace("\\\n", " "))
    rights = [f for f in flags if f.startswith(("--cap-", "--security-opt"))]
    assert rights == [f for f in served if f.startswith(("--cap-", "--security-opt"))]
    assert f"--publish={flags[flags.index('-p') + 1]}" in served


@pytest.mark.parametrize("format_name", ["docker", "podman", "quadlet", "systemd", "compose"])
def test_a_recipe_of_a_document_is_rendered_with_its_rights_and_its_address(
    format_name: str,
) -> None:
    documented = small_launch(container=ContainerSpec(as_documented=True))
    text = render_launch(documented, TARGET, format_name)
    assert not any(word in text for word in ("127.0.0.1", "rop=", "DropCap", "rivileges", "_drop"))


def test_a_systemd_unit_for_podman_needs_no_docker() -> None:
    unit = render_launch(small_launch(), LaunchTarget(image=IMAGE, runner="podman"), "systemd")
    assert "docker" not in unit
    assert "ExecStart=/usr/bin/podman run --rm" in unit
    assert ":/models:ro,Z" in unit


def test_compose() -> None:
    assert render_launch(small_launch(), TARGET, "compose") == text("""
        # compose.yaml: `docker compose up -d` in its folder starts sm120-small-2x.
        name: sm120-small-2x
        services:
          engine:
            image: IMAGE
            command:
            - /models
            - --served-model-name
            - small
            - --port
            - '8000'
            restart: unless-stopped
            ports:
            - '127.0.0.1:8000:8000'
            cap_drop:
            - ALL
            cap_add:
            - SYS_NICE
            security_opt:
            - no-new-privileges
            ipc: host
            ulimits:
              memlock: -1
            environment:
              NCCL_P2P_LEVEL: SYS
            volumes:
            - type: bind
              source: /data/small
              target: /models
              read_only: true
              bind:
                create_host_path: false
            - type: volume
              source: cache
              target: /home/engine
            deploy:
              resources:
                reservations:
                  devices:
                  - driver: cdi
                    device_ids:
                    - nvidia.com/gpu=all
                    capabilities:
                    - gpu
        volumes:
          cache:
            name: sm120-small-2x-0123456789ab
        """)


def test_kubernetes_runs_without_rights_and_is_ready_when_the_engine_is_healthy() -> None:
    pod = pod_of()
    engine = pod["containers"][0]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert engine["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": ["SYS_NICE"]},
    }
    assert engine["readinessProbe"] == {"httpGet": {"path": "/health", "port": "http"}}
    assert engine["resources"] == {"limits": {"nvidia.com/gpu": 2}}
    assert engine["image"] == IMAGE


def test_kubernetes_mounts_weights_read_only_and_memory_at_dev_shm() -> None:
    pod = pod_of()
    assert pod["containers"][0]["volumeMounts"] == [
        {"name": "models", "mountPath": "/models", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "cache", "mountPath": "/home/engine"},
    ]
    assert pod["volumes"] == [
        {"name": "models", "hostPath": {"path": "/data/small", "type": "Directory"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "cache", "emptyDir": {}},
    ]


def test_kubernetes_takes_weights_from_a_claim() -> None:
    mounts = [Mount(host=f"/data/{x}", inside=f"/{x}") for x in ("models", "draft")]
    claimed, draft, *_ = pod_of(LaunchTarget(image=IMAGE, claim="weights"), mounts=mounts)[
        "volumes"
    ]
    assert claimed["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    assert draft["hostPath"]["path"] == "/data/draft"


@pytest.mark.parametrize("claim", ["Weights", "a/b", "-a", "a_b"])
def test_what_is_no_name_of_a_claim_is_refused(claim: str) -> None:
    with pytest.raises(RecipeInvalid, match="PersistentVolumeClaim"):
        pod_of(LaunchTarget(image=IMAGE, claim=claim))


def test_kubernetes_takes_weights_from_an_image_by_digest() -> None:
    mounts = [Mount(host=f"/data/{x}", inside=f"/{x}") for x in ("models", "draft")]
    weights = f"registry.lan/weights/small@sha256:{'a' * 64}"
    target = LaunchTarget(image=IMAGE, weights_image=weights)
    pod = pod_of(target, mounts=mounts)
    models, draft, *_ = pod["volumes"]
    assert models == {
        "name": "models",
        "image": {"reference": weights, "pullPolicy": "IfNotPresent"},
    }
    assert pod["containers"][0]["volumeMounts"][0]["readOnly"] is True
    assert draft["hostPath"]["path"] == "/data/draft"


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ({"weights_image": "registry.lan/weights/small:v1"}, "is named by its digest"),
        ({"weights_image": "registry.lan/weights/small"}, "is named by its digest"),
        (
            {"weights_image": f"registry.lan/w@sha256:{'a' * 64}", "claim": "weights"},
            "from a claim and from an image",
        ),
    ],
)
def test_weights_of_an_image_that_may_change_or_of_two_places_are_refused(
    target: dict[str, str], why: str
) -> None:
    with pytest.raises(RecipeInvalid, match=why):
        pod_of(LaunchTarget.model_validate({"image": IMAGE, **target}))


def test_the_service_of_kubernetes_finds_the_pod() -> None:
    deployment, service = yaml.safe_load_all(render_launch(small_launch(), TARGET, "kubernetes"))
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (service["spec"]["selector"], deployment["spec"]["selector"]["matchLabels"]):
        assert selector.items() <= labels.items()
    assert service["spec"]["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]


def test_kubernetes_chooses_gpus_itself_and_has_short_names() -> None:
    with pytest.raises(RecipeInvalid, match="chooses the GPUs itself"):
        pod_of(LaunchTarget(image=IMAGE, gpus=[0, 1]))
    with pytest.raises(RecipeInvalid, match="longer than"):
        pod_of(recipe="x" * 60)


@pytest.mark.parametrize("name", ["x-", "x.", "x+"])
def test_a_name_that_kubernetes_does_not_take_is_refused(name: str) -> None:
    with pytest.raises(RecipeInvalid, match="ends in a letter or a digit"):
        pod_of(recipe=name)
    assert "--name sm120-x-" in render_launch(small_launch(recipe=name), TARGET, "systemd")


def test_shell_is_the_same_engine_without_a_container() -> None:
    launch = small_launch(mounts=[], arguments=["/data/small", "--port", "8000"])
    assert render_launch(launch, LaunchTarget(gpus=[2, 3]), "shell") == text(r"""
        #!/bin/sh
        # small-2x: small by vllm, without a container
        set -eu
        export CUDA_VISIBLE_DEVICES=2,3
        export NCCL_P2P_LEVEL=SYS
        exec vllm serve \
          /data/small \
          --port 8000 \
          --host 0.0.0.0
        """)


@pytest.mark.parametrize("words", [["--host", "127.0.0.1"], ["--host=127.0.0.1"]])
def test_an_address_that_the_recipe_names_stays(words: list[str]) -> None:
    script = render_launch(small_launch(arguments=words), TARGET, "shell")
    assert "0.0.0.0" not in script


@pytest.mark.parametrize("format_name", ["docker", "podman", "quadlet", "systemd"])
def test_chosen_gpus_are_the_only_ones(format_name: str) -> None:
    rendered = render_launch(small_launch(), LaunchTarget(image=IMAGE, gpus=[1, 3]), format_name)
    assert "nvidia.com/gpu=1" in rendered
    assert "nvidia.com/gpu=3" in rendered
    assert "gpu=all" not in rendered


def test_chosen_gpus_are_the_only_ones_in_compose() -> None:
    deploy = engine_of(LaunchTarget(image=IMAGE, gpus=[1, 3]))["deploy"]
    device = deploy["resources"]["reservations"]["devices"][0]
    assert device["device_ids"] == ["nvidia.com/gpu=1", "nvidia.com/gpu=3"]


@pytest.mark.parametrize(
    ("gpus", "words", "device"),
    [
        (None, "--gpus all", {"count": "all"}),
        # Docker takes a list in quotes of its own
        ([1, 3], """--gpus '"device=1,3"'""", {"device_ids": ["1", "3"]}),
    ],
)
def test_a_docker_without_cdi_is_asked_for_the_same_cards(
    gpus: list[int] | None, words: str, device: dict[str, Any]
) -> None:
    target = LaunchTarget(image=IMAGE, gpus=gpus, cdi=False)
    text = render_launch(small_launch(), target, "docker")
    assert f"  {words} \\\n" in text
    assert "nvidia.com" not in text
    reserved = engine_of(target)["deploy"]["resources"]["reservations"]["devices"]
    assert reserved == [{"driver": "nvidia", **device, "capabilities": ["gpu"]}]
    assert "gpus" not in render_launch(
        small_launch(cards=0), target.model_copy(update={"gpus": None}), "docker"
    )


@pytest.mark.parametrize("format_name", ["docker", "podman"])
def test_a_container_in_the_background_is_kept_when_it_ends(format_name: str) -> None:
    text = render_launch(small_launch(), LaunchTarget(image=IMAGE, detached=True), format_name)
    assert text.startswith(f"{format_name} run -d \\\n")
    assert "--rm" not in text


@pytest.mark.parametrize("gpus", [[0], [0, 1, 2], [1, 1], []])
@pytest.mark.parametrize("format_name", ["docker", "compose", "shell"])
def test_another_number_of_gpus_than_the_recipe_needs_is_refused(
    format_name: str, gpus: list[int]
) -> None:
    with pytest.raises(RecipeInvalid, match="is for 2 GPUs"):
        render_launch(small_launch(), LaunchTarget(image=IMAGE, gpus=gpus), format_name)


@pytest.mark.parametrize("format_name", list(CONTAINED))
def test_a_recipe_without_cards_asks_for_none_and_for_nothing_that_only_cards_need(
    format_name: str,
) -> None:
    rendered = render_launch(small_launch(cards=0, engine="llama-cpp"), TARGET, format_name)
    unwanted = ("gpu", "--ipc", "ipc:", "memlock", "MEMLOCK", "/dev/shm", "/home/engine")
    assert not [word for word in unwanted if word in rendered]


PRIVATE = ContainerSpec(ipc="private", memory_locked=False)


@pytest.mark.parametrize(
    ("format_name", "line"),
    [
        ("docker", "  --shm-size=34359738368 \\"),
        ("podman", "  --shm-size=34359738368 \\"),
        ("quadlet", "PodmanArgs=--shm-size=34359738368"),
        ("systemd", "  --shm-size=34359738368 \\"),
        ("compose", "    shm_size: 34359738368"),
        ("kubernetes", "          sizeLimit: '34359738368'"),
    ],
)
def test_private_memory_is_private_and_as_large_as_a_served_one_has_it(
    format_name: str, line: str
) -> None:
    rendered = render_launch(small_launch(container=PRIVATE), TARGET, format_name)
    assert not [word for word in ("ipc", "memlock", "MEMLOCK") if word in rendered]
    assert line in rendered.splitlines()
    assert container_arguments(small_launch(container=PRIVATE), image=IMAGE).shm_bytes == 32 << 30
    shared = render_launch(small_launch(), TARGET, format_name)
    assert "34359738368" not in shared


@pytest.mark.parametrize(
    ("format_name", "line"),
    [
        ("docker", "--pull=never"),
        ("podman", "--pull=never"),
        ("quadlet", "PodmanArgs=--pull=never"),
        ("systemd", "--pull=never"),
        ("compose", "pull_policy: never"),
        ("kubernetes", "imagePullPolicy: Never"),
    ],
)
def test_no_registry_answers_for_the_name_of_a_local_image(format_name: str, line: str) -> None:
    assert line in render_launch(small_launch(), LOCAL, format_name)
    assert "never" not in render_launch(small_launch(), TARGET, format_name).lower()


@pytest.mark.parametrize(
    ("format_name", "name"),
    [
        ("docker", "  sm120/vllm:0123456789ab \\"),
        ("podman", "  localhost/sm120/vllm:0123456789ab \\"),
        ("quadlet", "Image=localhost/sm120/vllm:0123456789ab"),
        ("systemd", "  sm120/vllm:0123456789ab \\"),
        ("compose", "    image: sm120/vllm:0123456789ab"),
    ],
)
def test_a_local_image_has_the_name_that_loading_gave_it(format_name: str, name: str) -> None:
    assert name in render_launch(small_launch(), LOCAL, format_name).splitlines()


@pytest.mark.parametrize(
    ("format_name", "settings", "library"),
    [
        ("docker", "--env-file /etc/sm120/nccl.env", "/usr/local/lib/sm120:ro "),
        # labels of the host's own folders are not changed
        ("podman", "--env-file /etc/sm120/nccl.env", "/usr/local/lib/sm120:ro "),
        ("quadlet", "EnvironmentFile=/etc/sm120/nccl.env", "/usr/local/lib/sm120:ro\n"),
        ("systemd", "--env-file /etc/sm120/nccl.env", "/usr/local/lib/sm120:ro "),
        ("compose", "- /etc/sm120/nccl.env", "source: /usr/local/lib/sm120"),
        ("kubernetes", "name: sm120-nccl", "path: /usr/local/lib/sm120"),
    ],
)
def test_the_hosts_nccl_is_used_where_it_is_asked_for(
    format_name: str, settings: str, library: str
) -> None:
    rendered = render_launch(small_launch(), NCCL, format_name)
    assert settings in rendered
    assert library in rendered
    only_settings = render_launch(
        small_launch(), LaunchTarget(image=IMAGE, nccl="settings"), format_name
    )
    assert settings in only_settings
    assert library not in only_settings
    assert "nccl.env" not in render_launch(small_launch(), TARGET, format_name)


def test_a_script_reads_the_hosts_nccl_settings() -> None:
    assert ". /etc/sm120/nccl.env" in render_launch(small_launch(), NCCL, "shell")
    assert "nccl.env" not in render_launch(small_launch(), TARGET, "shell")


@pytest.mark.parametrize("format_name", list(CONTAINED))
def test_a_recipe_without_an_image_has_no_container(format_name: str) -> None:
    with pytest.raises(RecipeInvalid, match="has no image"):
        render_launch(small_launch(image=None), LaunchTarget(), format_name)


def test_what_is_compiled_is_kept_apart_by_image_and_recipe() -> None:
    names = {
        line
        for changes in ({}, {"digest": "sha256:" + "b" * 64}, {"recipe": "other.1+x"})
        for line in render_launch(small_launch(**changes), TARGET, "docker").splitlines()
        if "/home/engine" in line
    }
    assert names == {
        "  -v sm120-small-2x-0123456789ab:/home/engine \\",
        "  -v sm120-small-2x-bbbbbbbbbbbb:/home/engine \\",
        f"  -v sm120-other-1-x-{DIGEST[7:19]}:/home/engine \\",
    }


@pytest.mark.parametrize(
    ("format_name", "runner", "lines"),
    [
        (
            "systemd",
            "docker",
            [
                *("--label=sm120.recipe=small-2x", "--log-opt=max-size=50m"),
                *("--log-opt=max-file=5", "--publish=10.0.0.5:9400:8000", "--pull=never"),
            ],
        ),
        ("systemd", "podman", ["--log-driver=journald", "--publish=10.0.0.5:9400:8000"]),
        (
            "quadlet",
            "podman",
            [
                *("PodmanArgs=--label=sm120.port=8000", "PodmanArgs=--log-driver=journald"),
                "PodmanArgs=--pull=never",
            ],
        ),
    ],
)
def test_a_deployed_unit_is_found_again_rotates_its_log_and_always_comes_back(
    format_name: str, runner: str, lines: list[str]
) -> None:
    unit = UnitSettings(metrics="10.0.0.5:9400")
    target = TARGET.model_copy(update={"runner": runner, "deployed": unit})
    rendered = render_launch(small_launch(), target, format_name)
    found = [line.strip().removesuffix(" \\") for line in rendered.splitlines()]
    assert [line for line in lines if line not in found] == []
    assert "Restart=always" in found
    # a host that the role health took out of service does not start it
    out = "ConditionPathExists=!/run/sm120/out-of-service"
    assert out in found
    assert out not in render_launch(small_launch(), TARGET, format_name)
    assert "Restart=on-failure" in render_launch(small_launch(), TARGET, format_name)


@pytest.mark.parametrize(
    "metrics", ["9400", "host:9400", "10.0.0.5:", "10.0.0.5:9400 --privileged"]
)
def test_what_is_no_address_for_metrics_is_refused(metrics: str) -> None:
    with pytest.raises(ValidationError):
        UnitSettings(metrics=metrics)
