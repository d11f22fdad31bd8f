"""A Docker daemon that can be killed and started again, with the images that it had."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.chaos.world import World
from tests.testbed.dockerd import answers_ping, bridge, dockerd_command, end_containerd
from tests.testbed.packages import CannotHave, find_program
from tests.testbed.programs import last_words

_STARTED: dict[str, RestartableDocker] = {}


class RestartableDocker:
    """dockerd with its own data, socket and bridge."""

    def __init__(self, world: World) -> None:
        self.run = Path(tempfile.mkdtemp(prefix="sm120-", dir="/tmp"))
        self.data = world.home / "dockerd"
        self.data.mkdir()
        self.name, _ = world.stack.enter_context(bridge())
        self.url = f"unix://{self.run / 'docker.sock'}"
        self.start()
        world.stack.callback(self.kill)
        world.more_env["DOCKER_HOST"] = self.url

    def start(self) -> None:
        (self.run / "dockerd.pid").unlink(missing_ok=True)
        command = dockerd_command(self.data, self.run, self.name, ("--storage-driver=vfs",))
        with (self.data / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        end = time.monotonic() + 60
        while not answers_ping(self.run / "docker.sock"):
            if time.monotonic() > end or self.process.poll() is not None:
                raise CannotHave(f"dockerd does not start here: {last_words(self.data / 'log')}")
            time.sleep(0.05)

    def kill(self) -> None:
        """As a crash of the machine's Docker: nothing is said to anybody."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        pid_file = self.run / "exec" / "containerd" / "containerd.pid"
        end_containerd(pid_file)
        with suppress(OSError, ValueError):
            # an orphan is ours, the first process here: one that nobody waits for counts as alive
            os.waitpid(int(pid_file.read_text()), 0)
        pid_file.unlink(missing_ok=True)

    def docker(self, *words: str) -> str:
        command = [find_program("docker"), "--host", self.url, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""


def restartable_docker(world: World) -> RestartableDocker:
    """One for all trials."""
    key = str(world.home)
    if key not in _STARTED:
        _STARTED[key] = RestartableDocker(world)
    daemon = _STARTED[key]
    for image in daemon.docker("images", "--quiet").split():
        daemon.docker("rmi", "--force", image)
    return daemon


def loaded_image(world: World) -> str | None:
    """The layers of the image that Docker has under our name."""
    asked = ("image", "inspect", "--format", "{{json .RootFS.Layers}}", "sm120/tiny:latest")
    return _STARTED[str(world.home)].docker(*asked) or None
