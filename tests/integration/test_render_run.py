"""A rendered command and a rendered Compose file, run by a real Docker daemon."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.models.containers import Container

from pipeline.app.workspace import host_platform
from pipeline.artifacts.containers.arguments import Mount
from pipeline.artifacts.containers.docker import default_tag
from pipeline.serving.recipe.container import LaunchTarget
from pipeline.serving.recipe.launch import Launch
from pipeline.serving.recipe.model import ContainerSpec
from pipeline.serving.recipe.render.formats import render_launch
from tests.integration.built import Built, build_image, sm120
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.engine import chat
from tests.testbed.packages import system_environment
from tests.testbed.ports import unused_port
from tests.testbed.tiny_gguf import expected_text
from tests.unit.recipe.render.launches import small_launch

HEALTHY_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def reference(lean_store: Path, docker_daemon: DockerDaemon) -> str:
    """llama-cpp-cpu in Docker, by the name that a rendering has for it."""
    image: Built = build_image(lean_store, "llama-cpp-cpu", host_platform())
    sm120(image.store, "load", "llama-cpp-cpu", DOCKER_HOST=docker_daemon.socket_url)
    return default_tag("llama-cpp-cpu", image.digest)


def tiny_launch(model: Path) -> Launch:
    port = unused_port()
    arguments = ["-m", f"/models/{model.name}", "-t", "1", "-c", "512", "--port", str(port)]
    return small_launch(
        recipe="tiny",
        # named so that it gets a volume for what it compiles
        engine="vllm",
        image="llama-cpp-cpu",
        arguments=[*arguments, "--alias", "it's $HOME 50%"],
        mounts=[Mount(host=str(model.parent), inside="/models")],
        environment={"HOSTILE": "it's $HOME 50%"},
        port=port,
        cards=0,
    )


@contextmanager
def shell_command(daemon: DockerDaemon, text: str) -> Iterator[None]:
    """A command as somebody pastes it."""
    env = system_environment(DOCKER_HOST=daemon.socket_url)
    with subprocess.Popen(["sh", "-c", f"exec {text}"], env=env) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def compose_file(daemon: DockerDaemon, compose: Path, file: Path) -> Iterator[None]:
    env = system_environment(DOCKER_HOST=daemon.socket_url)
    command = [str(compose), "-f", str(file)]
    try:
        subprocess.run([*command, "up", "--detach", "--quiet-pull"], env=env, check=True)
        yield
    finally:
        subprocess.run([*command, "down", "--volumes"], env=env, check=False)


def require_served(daemon: DockerDaemon, reference: str, launch: Launch) -> None:
    """It answers, as its own user, who can write its caches and not the weights."""
    with closing(docker.DockerClient(base_url=daemon.socket_url)) as client:
        container = running(client, reference)
        require_healthy(container, launch.port)
        assert chat(f"http://127.0.0.1:{launch.port}", max_tokens=8) == expected_text(8)
        assert output(container, "id -u") == "1000"
        assert output(container, "touch /models/x 2>/dev/null || echo refused") == "refused"
        assert output(container, "mkdir -p /home/engine/.cache/x && echo kept") == "kept"
        assert output(container, 'printf "%s" "$HOSTILE"') == launch.environment["HOSTILE"]
        assert container.attrs["Config"]["Cmd"] == launch.arguments
        volumes = [m["Name"] for m in container.attrs["Mounts"] if m["Type"] == "volume"]
        assert volumes == ["sm120-tiny-0123456789ab"]


def output(container: Container, script: str) -> str:
    shown: Any = container.exec_run(["sh", "-c", script]).output
    return str(shown.decode()).strip()


def running(client: docker.DockerClient, reference: str) -> Container:
    deadline = time.monotonic() + HEALTHY_TIMEOUT_S
    while time.monotonic() < deadline:
        if found := client.containers.list(filters={"ancestor": reference}):
            container: Container = found[0]
            return container
        time.sleep(0.1)
    raise AssertionError("the container did not start")


def require_healthy(container: Container, port: int) -> None:
    ask = f"import urllib.request as r; r.urlopen('http://127.0.0.1:{port}/health', timeout=5)"
    deadline = time.monotonic() + HEALTHY_TIMEOUT_S
    while container.exec_run(["python3", "-c", ask]).exit_code != 0:
        assert time.monotonic() < deadline, container.logs(tail=20).decode()
        time.sleep(0.2)


def test_a_pasted_command_serves(
    docker_daemon: DockerDaemon, reference: str, tiny_model: Path
) -> None:
    launch = tiny_launch(tiny_model)
    with shell_command(
        docker_daemon, render_launch(launch, LaunchTarget(image=reference), "docker")
    ):
        require_served(docker_daemon, reference, launch)


# Docker's seccomp profile allows this call only where SYS_NICE is added, whoever the user is
# (moby: profiles/seccomp/default_linux.go). 0, None, 0 asks for the policy that is there anyway.
SET_MEMORY_POLICY = """
import ctypes, os, platform
number = {"x86_64": 238, "aarch64": 237}[platform.machine()]
libc = ctypes.CDLL(None, use_errno=True)
refused = libc.syscall(number, 0, None, 0)
print(os.getuid(), os.strerror(ctypes.get_errno()) if refused else "allowed")
"""


@pytest.mark.parametrize(
    ("capabilities", "answer"),
    [
        (["SYS_NICE"], "1000 allowed"),
        ([], "1000 Operation not permitted"),
        (["SYS_PTRACE"], "1000 Operation not permitted"),
    ],
)
def test_sys_nice_lets_an_engine_that_is_not_root_place_its_memory(
    docker_daemon: DockerDaemon,
    reference: str,
    tiny_model: Path,
    capabilities: list[str],
    answer: str,
) -> None:
    spec = ContainerSpec(capabilities=capabilities)
    launch = tiny_launch(tiny_model).model_copy(update={"container": spec})
    text = render_launch(launch, LaunchTarget(image=reference, detached=True), "docker")
    env = system_environment(DOCKER_HOST=docker_daemon.socket_url)
    started = subprocess.run(
        ["sh", "-c", text], env=env, check=True, capture_output=True, text=True
    )
    with closing(docker.DockerClient(base_url=docker_daemon.socket_url)) as client:
        container = client.containers.get(started.stdout.strip())
        try:
            shown: Any = container.exec_run(["python3", "-c", SET_MEMORY_POLICY]).output
            assert shown.decode().strip() == answer
        finally:
            container.remove(force=True)


def test_a_compose_file_serves(
    docker_daemon: DockerDaemon,
    reference: str,
    tiny_model: Path,
    trixie: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    launch, file = tiny_launch(tiny_model), tmp_path / "compose.yaml"
    file.write_text(render_launch(launch, LaunchTarget(image=reference), "compose"))
    with compose_file(docker_daemon, trixie("docker-compose"), file):
        require_served(docker_daemon, reference, launch)
