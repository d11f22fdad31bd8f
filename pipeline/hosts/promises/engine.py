"""Deployed engines: each runs in the version that passed, and answers."""

from __future__ import annotations

import json

from pipeline.hosts.fleet.promised import EnginePromise
from pipeline.hosts.promises import checks
from pipeline.hosts.promises.checks import Host, require

_RECORDS = "/var/lib/sm120-engine"
_AGAIN = "`sm120 host deploy RECIPE -i INVENTORY` puts it back and proves it."
# asks as a client on the host does; no proxy of root's environment is in between
_ASK = """
import http.client, sys
c = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=10)
c.request("GET", "/health")
print(c.getresponse().status)
"""


def test_each_service_starts_at_boot_and_runs(host: Host, wanted: EnginePromise) -> None:
    """By a unit that nothing changes."""
    for engine in wanted.engines:
        unit = f"{engine.name}.service"
        service = host.service(unit)
        require(service.is_enabled, f"{unit} does not start at boot", _AGAIN)
        require(service.is_running, f"{unit} does not run", _AGAIN)
        checks.require_untouched_unit(host, unit)


def test_each_unit_is_as_it_was_deployed(host: Host, wanted: EnginePromise) -> None:
    """Flags, mounts, limits and the image by its digest."""
    for engine in wanted.engines:
        same = checks.text_of(host, engine.unit_path) == engine.unit
        require(same, f"{engine.unit_path} was changed", _AGAIN)


def test_each_record_is_of_the_version_that_was_deployed(host: Host, wanted: EnginePromise) -> None:
    """A host goes back to what its record names."""
    for engine in wanted.engines:
        path = f"{_RECORDS}/{engine.recipe}/passed.json"
        try:
            record = json.loads(checks.text_of(host, path))
        except ValueError as error:
            raise checks.Broken(f"{path} is no JSON", _AGAIN) from error
        for name in ("recipe_digest", "image_digest"):
            want, got = getattr(engine, name), record.get(name)
            require(got == want, f"{path}: {name} is {got}, deployed was {want}", _AGAIN)


def test_each_container_runs_the_image_that_passed(host: Host, wanted: EnginePromise) -> None:
    """As the container engine itself reports it."""
    for engine in wanted.engines:
        words = f"{engine.runtime} container inspect --format %s %s"
        done = host.run(words, "{{.Image}} {{.State.Running}}", engine.name)
        require(done.rc == 0, f"{engine.name}: no such container", _AGAIN)
        image, _, running = done.stdout.strip().partition(" ")
        require(running == "true", f"{engine.name} does not run", _AGAIN)
        # Podman leaves the algorithm out
        found = image if ":" in image else f"sha256:{image}"
        require(found in engine.image_ids, f"{engine.name} runs the image {found}", _AGAIN)


def test_each_engine_answers(host: Host, wanted: EnginePromise) -> None:
    """By `/health`, which engines refuse while they load or after a card's error."""
    for engine in wanted.engines:
        done = host.run("python3 -c %s %s", _ASK, str(engine.port))
        code = done.stdout.strip() or "nothing"
        fix = f"journalctl --unit {engine.name} shows why; then {_AGAIN}"
        require(code == "200", f"{engine.recipe}: /health at {engine.port} says {code}", fix)
