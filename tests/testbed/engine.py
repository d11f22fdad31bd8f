"""An engine in a container, locked down as in production, and greedy requests to it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Barrier
from typing import Any

import docker
from docker.models.containers import Container

from tests.testbed.dockerd import DockerDaemon

MODELS = "/models"
SERVE_PORT = "8080/tcp"
READY_TIMEOUT_S = 60.0
REQUEST_TIMEOUT_S = 60.0


class EngineNotReady(Exception):
    """The engine ended or did not become healthy; the message holds the end of its log."""


@contextmanager
def started_container(
    daemon: DockerDaemon, image_ref: str, args: Sequence[str], model_dir: Path, port: int = 0
) -> Iterator[Container]:
    """A container of the image, as its own user, with nothing writable; removed after.

    Port 0 lets Docker pick a free one.
    """
    with closing(docker.DockerClient(base_url=daemon.socket_url)) as client:
        container = client.containers.create(
            image_ref,
            list(args),
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            volumes={str(model_dir): {"bind": MODELS, "mode": "ro"}},
            ports={SERVE_PORT: ("127.0.0.1", port)},
        )
        try:
            container.start()
            yield container
        finally:
            container.remove(force=True, v=True)


@contextmanager
def running_container(
    daemon: DockerDaemon, image_ref: str, args: Sequence[str], model_dir: Path, port: int = 0
) -> Iterator[str]:
    """The base URL of an engine that serves the models of `model_dir`, healthy on entry."""
    with started_container(daemon, image_ref, args, model_dir, port) as container:
        yield wait_until_healthy(container)


def wait_until_healthy(container: Container) -> str:
    """The base URL of the container's engine, once /health says yes."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        container.reload()
        if container.status == "exited":
            break
        bindings = container.ports.get(SERVE_PORT)
        if bindings:
            base_url = f"http://127.0.0.1:{bindings[0]['HostPort']}"
            if is_healthy(base_url):
                return base_url
        time.sleep(0.05)
    log = container.logs(tail=20).decode(errors="replace")
    raise EngineNotReady(f"the engine is {container.status} and not healthy; it said:\n{log}")


def is_healthy(base_url: str) -> bool:
    """Whether the engine says that it can answer."""
    try:
        with urllib.request.urlopen(f"{base_url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def chat(base_url: str, prompt: str = "Hello", max_tokens: int = 32) -> str:
    """The engine's greedy answer."""
    with ask(base_url, prompt, max_tokens, stream=False) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    return str(text)


def chat_many(base_url: str, streams: int = 8, max_tokens: int = 32) -> list[str]:
    """The greedy answers of that many streaming requests, all sent at the same moment."""
    gate = Barrier(streams)

    def one(number: int) -> str:
        gate.wait(REQUEST_TIMEOUT_S)
        return chat_stream(base_url, f"This is request {number}.", max_tokens)

    with ThreadPoolExecutor(streams) as pool:
        return list(pool.map(one, range(streams)))


def chat_load(base_url: str, requests: int, streams: int = 8, max_tokens: int = 16) -> list[str]:
    """The greedy answers of many requests, so many at a time: slots end at all moments."""
    with ThreadPoolExecutor(streams) as pool:
        prompts = [f"This is request {number}." for number in range(requests)]
        return list(pool.map(lambda prompt: chat(base_url, prompt, max_tokens), prompts))


def chat_stream(base_url: str, prompt: str, max_tokens: int) -> str:
    """The greedy answer, put together from server-sent events."""
    text = ""
    with ask(base_url, prompt, max_tokens, stream=True) as answer:
        for line in answer:
            event = line.decode().strip().removeprefix("data: ")
            if event.startswith("{"):
                for choice in json.loads(event)["choices"]:
                    text += choice["delta"].get("content") or ""
    return text


def ask(base_url: str, prompt: str, max_tokens: int, *, stream: bool) -> Any:
    """Send one chat request; the answer is a file to read and close."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": stream,
    }
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S)
