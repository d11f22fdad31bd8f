"""Judges the promises of one host: a row for each check of each role that it has.

A check's name is the promise as a sentence; its parameters name what it gets.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

from pipeline.core.errors import MissingTool
from pipeline.core.known import Known
from pipeline.hosts.facts.model import HostFacts
from pipeline.hosts.fleet.playbook import ANSIBLE_HINT
from pipeline.hosts.fleet.promised import Promised, Roles
from pipeline.hosts.fleet.remote import Remote, Unreached
from pipeline.hosts.fleet.verify import Row
from pipeline.hosts.promises import owned, pinned_packages
from pipeline.hosts.promises.checks import Host, Outcome, Undecided, known, locked_target

Check: TypeAlias = Callable[..., None]

# what is true of every host, then a module for each role
MODULES = {
    name: import_module(f"pipeline.hosts.promises.{name}") for name in ("host", *Roles.model_fields)
}
# the part of the host lock that a role installs
PARTS = {
    "nvidia_driver": "driver",
    "cuda": "cuda",
    "container_runtime": "container_toolkit",
    "nccl": "nccl",
}
# of all checks of a host: each command has a limit of its own, but on a host in trouble all of
# them may reach it
_LIMIT_S = 1800.0
_FIX = "Run the playbook again; it puts this back (`--tags {role}` for this role alone)."


def judge_promises(
    promised: Promised, remote: Remote, facts: Known[HostFacts], roles: Sequence[str] = ()
) -> list[Row]:
    """Judge the promises of these roles, or of all, and always those of every host."""
    given = {
        "host": _testinfra(promised.host, remote),
        "facts": facts,
        "promised": promised,
        "lock": locked_target(promised.lock_file, promised.target),
    }
    deadline = time.monotonic() + _LIMIT_S
    return [
        judge_check(role, check, part, given, deadline)
        for role in ("host", *promised.roles.states())
        if not roles or role in ("host", *roles)
        for check, part in checks_of(role)
        if not passed_over(role, check, part, promised.roles)
    ]


def checks_of(role: str) -> list[tuple[Check, str]]:
    """Every check of a role, each with the part of the lock that it is about."""
    checks = [(check, "") for check in checks_in(MODULES[role])]
    if role != "host":
        checks += [(check, "") for check in checks_in(owned)]
    if role in PARTS:
        checks += [(check, PARTS[role]) for check in checks_in(pinned_packages)]
    return checks


def checks_in(module: ModuleType) -> list[Check]:
    """The checks of a module, in its order."""
    return [check for name, check in vars(module).items() if name.startswith("test_")]


def passed_over(role: str, check: Check, part: str, roles: Roles) -> str:
    """Why a check does not apply to this host; empty if it does."""
    state = "present" if role == "host" else roles.states().get(role, "not chosen")
    if state != ("absent" if check is owned.test_nothing_of_the_role_is_left else "present"):
        return f"the role {role} is {state} for this host"
    # containers bring their own toolkit and library
    bare = {
        "cuda": roles.cuda is not None and not roles.cuda.toolkit,
        "nccl": roles.nccl is not None and not roles.nccl.library,
    }
    return f"{role} installs no packages on this host" if part and bare.get(role) else ""


def _testinfra(name: str, remote: Remote) -> Host:
    """The host for testinfra, whose commands go through our own root shell."""
    try:
        # imported late: the package is in a group that other commands do not need
        from testinfra.backend.base import BaseBackend
        from testinfra.host import Host as TestinfraHost
    except ImportError as error:
        message = f"pytest-testinfra is not installed: {error}"
        raise MissingTool(message, ANSIBLE_HINT) from error

    class RootBackend(BaseBackend):  # type: ignore[misc]
        NAME = "sm120"

        def run(self, command: str, *args: str, **kwargs: Any) -> Any:
            full = self.quote(command, *args)
            done = remote.run(full)
            return self.result(done.code, full.encode(), done.out, done.err)

    backend = RootBackend(name)
    host = TestinfraHost(backend)
    backend.set_host(host)
    return host


def judge_check(
    role: str, check: Check, part: str, given: dict[str, Any], deadline: float = math.inf
) -> Row:
    """Run one check with what its parameters name; return its row."""
    sentence = check.__name__.removeprefix("test_").replace("_", " ")
    names = {
        "role": role,
        "promise": f"{sentence} ({part})" if part else sentence,
        "rule": getattr(check, "rule", ""),
    }
    wanted = getattr(given["promised"].roles, role, None)
    values = {**given, "role": role, "part": part, "wanted": wanted}
    try:
        if time.monotonic() > deadline:
            raise Undecided(f"not judged: the checks before it took {_LIMIT_S:g} s")
        check(**{name: known(values[name]) for name in inspect.signature(check).parameters})
    except Outcome as error:
        fix = error.fix or (_FIX.format(role=role) if error.verdict == "failed" else "")
        return Row(**names, verdict=error.verdict, why=error.why, fix=fix)
    except Unreached:
        raise
    except Exception as error:
        # any other error is ours, and proves nothing about the promise
        message = " ".join(f"{type(error).__name__}: {error}".split())
        return Row(**names, verdict="unknown", why=message[:400])
    return Row(**names, verdict="passed")
