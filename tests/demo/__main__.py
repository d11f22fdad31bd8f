"""`nox -s demo`: the whole story on this machine, in one folder, with nothing left running."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from pipeline.core import log
from tests.demo.overview import LeftOut, Overview
from tests.demo.shell import StepFailed
from tests.demo.story import STORY, Step
from tests.demo.world import MARK, World, make_empty, new_world
from tests.testbed.packages import CannotHave

FAILED, INTERRUPTED = 1, 130


def main(argv: list[str] | None = None) -> int:
    """Run the story; the exit code says whether every step and every break went as it should."""
    parser = argparse.ArgumentParser(prog="nox -s demo --", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder [demo]")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given = parser.parse_args(argv)
    try:
        make_empty(given.output)
    except FileExistsError as error:
        parser.error(f"{error}; --output names another")
    overview = Overview(list(STORY))
    code = tell(given.output, overview)
    body = {**overview.as_json(), "folder": str(given.output.resolve()), "code": code}
    (given.output / MARK).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(body) if given.json else overview.tables())
    busy = "on {cores} cores, load {load[0]} before and {load[1]} now".format(**body)
    log.say(f"{log.seconds(overview.seconds)} {busy}; nothing runs any more; see {given.output}")
    return code


def tell(folder: Path, overview: Overview) -> int:
    """All steps; whatever ends them, every part ends, too."""
    signal.signal(signal.SIGTERM, _interrupt)
    # also where a shell without job control started it in the background
    signal.signal(signal.SIGINT, _interrupt)
    try:
        with ExitStack() as stack:
            world = new_world(folder, stack, overview)
            try:
                for run in STORY.values():
                    run_step(world, run)
            finally:
                _be_patient()
    except StepFailed:
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return 0


def run_step(world: World, run: Step) -> None:
    """One step; what this machine cannot have leaves it out, with the reason."""
    with world.overview.step() as record:
        try:
            record.result = run(world)
        except CannotHave as why:
            raise LeftOut(str(why)) from why
        except (LeftOut, StepFailed):
            raise
        except Exception as error:
            place = world.folder / "logs" / "traceback.txt"
            place.write_text(traceback.format_exc(), encoding="utf-8")
            raise StepFailed(f"{type(error).__name__}: {error} (more: {place})") from error


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _be_patient() -> None:
    """Nobody is in too much of a hurry to let everything be ended."""
    log.say("Ending all that was started")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
