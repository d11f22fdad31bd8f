"""A signal ends a command as stopped, whatever a library makes of it."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from pipeline.app.registry import open_registry
from pipeline.artifacts.oci.reference import parse_repository
from pipeline.artifacts.registry.access import Access
from pipeline.core.errors import Interrupted
from tests.unit.support import ROOT

# what pydantic does with a KeyboardInterrupt that comes while it makes a model
STOPPED_IN_A_LIBRARY = """
import os, signal, sys
from pipeline.cli import main

def run(**_):
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
    except KeyboardInterrupt as error:
        raise {raised} from error

main.cli = run
main.main()
"""
FAILED_BY_ITSELF = """
from pipeline.cli import main

def run(**_):
    raise RuntimeError("no model")

main.cli = run
main.main()
"""


def ended(code: str, *args: object, ignoring: bool = False) -> tuple[int, str]:
    before = (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignoring else None
    command = [sys.executable, "-c", code, *map(str, args)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, preexec_fn=before)
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "raised", ['RuntimeError("no model")', 'OSError("none")', "SystemError", "ValueError"]
)
def test_a_stop_that_a_library_made_an_error_of_is_a_stop(number: int, raised: str) -> None:
    code, err = ended(STOPPED_IN_A_LIBRARY.format(raised=raised), int(number))
    assert code == Interrupted.exit_code
    assert (err.splitlines()[0], "defect" in err) == ("sm120: stopped", False)


def test_an_error_without_a_signal_is_no_stop() -> None:
    code, err = ended(FAILED_BY_ITSELF)
    assert (code, "defect" in err) == (1, True)


def test_a_command_that_was_started_to_ignore_Ctrl_C_ignores_it() -> None:
    code, err = ended(
        STOPPED_IN_A_LIBRARY.format(raised="ValueError"), int(signal.SIGINT), ignoring=True
    )
    assert (code, err) == (0, "")


def test_whatever_ends_a_command_ends_what_waits_for_a_registry() -> None:
    opened = open_registry(parse_repository("x.test/a"), Access(insecure_http=True))
    with suppress(KeyboardInterrupt), opened as repository:
        assert not repository.client.stop.is_set()
        raise KeyboardInterrupt
    assert repository.client.stop.is_set()
