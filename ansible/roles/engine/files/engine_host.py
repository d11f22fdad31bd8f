"""What the role engine asks a host, in one process; standard library, and nothing stays on it.

`look ORDER` prints what is deployed and in what it differs from the order. `image ORDER` refuses an
image whose id or layers are others than those that the evidence names. `wait ORDER SECONDS` waits
until the engine answers and compares the image that runs. ORDER is JSON, as `host deploy` makes it.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HOME = Path("/var/lib/sm120-engine")
# What is known only after a version passed; the rest of a record is the order itself.
ADDED = ("at", "smoke")
MACHINES = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
_ASK_S = 5.0
# Restart=always begins a crashed engine again for ever: after these nobody need wait any longer.
MOST_RESTARTS = 2


def run(*words: str) -> tuple[int, str]:
    """Exit code and output of a program; one that is missing has failed."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, check=False, errors="replace", timeout=120
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, done.stdout if done.returncode == 0 else done.stderr


def inspected(order: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    """An image or a container as its engine knows it; empty where it is not there."""
    code, out = run(order["runtime"], kind, "inspect", name)
    rows = json.loads(out) if code == 0 else []
    return rows[0] if rows else {}


def same_id(order: dict[str, Any], found: str) -> bool:
    """Docker's own store names an image by its config, containerd's by its manifest."""
    # Podman leaves the algorithm out
    return (found if ":" in found else f"sha256:{found}") in order["image_ids"]


def image_problem(order: dict[str, Any]) -> str:
    """In what the host's image differs from the signed one; empty where it is the same."""
    image = inspected(order, "image", order["image"])
    if not image:
        return f"{order['image']} is not on the host"
    if not same_id(order, image["Id"]):
        return f"the host reports the image {image['Id']}, signed is {order['image_ids'][0]}"
    layers = image.get("RootFS", {}).get("Layers") or []
    # an engine commits to its layers by the id, but could have mixed them up
    if layers != order["layers"]:
        return f"the host reports {len(layers)} layers, which are not those that were signed"
    return ""


def answer(port: int, path: str) -> tuple[int, bytes]:
    """What the server of this host says; 0 where nobody does."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ASK_S)
    try:
        connection.request("GET", path)
        got = connection.getresponse()
        return got.status, got.read(1 << 20)
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def running_problem(order: dict[str, Any]) -> str:
    """In what the container that runs is not of the order; empty where it is."""
    container = inspected(order, "container", order["name"])
    if not container.get("State", {}).get("Running"):
        return f"its container {order['name']} does not run"
    if not same_id(order, container["Image"]):
        return f"the container runs the image {container['Image']}, not {order['image_ids'][0]}"
    status, body = answer(order["port"], "/v1/models")
    try:
        names = [model["id"] for model in json.loads(body)["data"]] if status == 200 else None
    except (ValueError, LookupError, TypeError):
        names = None
    # an engine with an API key does not list its models
    if names is not None and order["model"] not in names:
        served = ", ".join(map(str, names)) or "no model"
        return f"port {order['port']} serves {served}, not {order['model']}"
    return ""


def unit_state(order: dict[str, Any]) -> dict[str, str]:
    """The service as systemd has it."""
    wanted = "--property=ActiveState,UnitFileState,NRestarts"
    _, out = run("systemctl", "show", f"{order['name']}.service", wanted)
    return dict(line.partition("=")[::2] for line in out.splitlines())


def read_record(order: dict[str, Any]) -> dict[str, Any] | None:
    """The version that passed last on this host."""
    try:
        record = json.loads((HOME / order["recipe"] / "passed.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("format") == order["format"] else None


def differences(order: dict[str, Any], passed: dict[str, Any] | None) -> list[str]:
    """Why the host has to be changed or proved again; none where all is as ordered and passed."""
    if passed is None:
        return ["no version has passed on this host"]
    record = {name: value for name, value in passed.items() if name not in ADDED}
    found = [f"{n} is another" for n in order if record.get(n) != order[n]]
    try:
        if Path(order["unit_path"]).read_text(encoding="utf-8") != order["unit"]:
            found.append("its unit is another")
    except OSError:
        found.append("its unit is missing")
    state = unit_state(order)
    if state.get("UnitFileState") not in ("enabled", "generated"):
        found.append("its unit does not start at boot")
    if state.get("ActiveState") != "active":
        found.append("its service does not run")
    elif problem := running_problem(order):
        found.append(problem)
    elif answer(order["port"], "/health")[0] != 200:
        found.append("it does not answer")
    return found


def wait_problem(order: dict[str, Any], limit_s: float) -> str:
    """Why the engine does not answer in time; empty once it does, with the image of the order."""
    unit, deadline = f"{order['name']}.service", time.monotonic() + limit_s
    while answer(order["port"], "/health")[0] != 200:
        state = unit_state(order)
        restarts = int(state.get("NRestarts") or 0)
        if state.get("ActiveState") == "failed" or restarts >= MOST_RESTARTS:
            words = ("journalctl", "--unit", unit, "--lines=40", "--output=cat", "--no-pager")
            # not systemd's own words about the end, but the engine's
            lines = [
                x
                for x in run(*words)[1].splitlines()
                if x and not x.startswith((unit, "Start", "Stop"))
            ]
            last = lines[-1].strip()[:300] if lines else "it printed nothing"
            return f"the engine ended {restarts or 1} times: {last}"
        if time.monotonic() > deadline:
            return f"it did not answer within {limit_s:g} s"
        time.sleep(0.5)
    return running_problem(order)


def main(words: list[str]) -> int:
    """One question."""
    verb, order = words[0], json.loads(words[1])
    if verb == "look":
        passed, machine = read_record(order), os.uname().machine
        body = {"passed": passed, "differs": differences(order, passed)}
        print(json.dumps({**body, "platform": MACHINES.get(machine, machine)}))
        return 0
    problem = image_problem(order) if verb == "image" else wait_problem(order, float(words[2]))
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
