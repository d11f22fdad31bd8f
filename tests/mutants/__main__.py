"""`nox -s mutants -- PACKAGE`: do its unit tests notice small wrong changes to its code?

A sample that the seed fixes, each mutant met only by the tests that enter its function, in a copy
of the working tree. mutmut and cosmic-ray are the known tools for this; neither draws a sample by
seed, and cosmic-ray runs all tests for every mutant and writes into the working tree.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from pipeline.core import log
from pipeline.core.errors import PipelineError
from tests.mutants import trials
from tests.mutants.accepted import read_accepted, stale
from tests.mutants.changes import Mutant
from tests.mutants.report import PackageReport, Progress, tell
from tests.mutants.sample import choose, files_of, mutants_in, tests_of
from tests.mutants.trials import CannotTest, EnteredMap, Outcome, Stopped, Tree, Trial

ROOT = Path(__file__).resolve().parents[2]


class Run:
    """The options of a run and its copies of the tree."""

    def __init__(self, root: Path, folder: Path, options: argparse.Namespace) -> None:
        self.root, self.options = root, options
        self.stop = threading.Event()
        self._trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for slot in range(options.jobs):
            self._trees.put(Tree(root, folder / f"{slot}" / "tree", self.stop))

    @contextmanager
    def tree(self) -> Iterator[Tree]:
        """A copy that nobody else uses."""
        tree = self._trees.get()
        try:
            yield tree
        finally:
            self._trees.put(tree)

    def report(self, package: str) -> PackageReport:
        """Sample a package and try each mutant that is not accepted."""
        accepted = read_accepted(self.root / "tests" / "mutants" / "accepted.toml")
        files = files_of(self.root, package)
        mutants = mutants_in(self.root, files)
        old = stale(accepted, mutants, files)
        chosen = choose(self._wanted(mutants), self.options.sample, self.options.seed)
        settled = self._killed_before() | {e.name: "accepted" for e in accepted}
        tried = self._try(package, [m for m in chosen if m.name not in settled])
        known = [Trial(m, settled[m.name]) for m in chosen if m.name in settled]
        return PackageReport(package, self.options.seed, [*tried, *known], old)

    def _wanted(self, mutants: list[Mutant]) -> list[Mutant]:
        if self.options.file:
            mutants = [m for m in mutants if m.file in self.options.file]
            if not mutants:
                raise CannotTest(f"nothing to change in {', '.join(self.options.file)}")
        return mutants

    def _killed_before(self) -> dict[tuple[str, ...], Outcome]:
        return dict.fromkeys(killed_in(self.options.again), "killed") if self.options.again else {}

    def _try(self, package: str, mutants: list[Mutant]) -> list[Trial]:
        entered = self._map(package)
        progress = Progress(package, len(mutants))

        def meet(mutant: Mutant) -> Trial:
            with self.tree() as tree:
                trial = tree.meet(mutant, entered)
            progress.add(trial)
            return trial

        with ThreadPoolExecutor(self.options.jobs) as pool:
            try:
                return list(pool.map(meet, mutants))
            except BaseException:
                self.stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _map(self, package: str) -> EnteredMap:
        tests = self.options.tests or tests_of(self.root, package)
        key = trials.fingerprint(self.root, *tests)
        entered = trials.load_map(self.root, key)
        if entered is None:
            also = f" and {len(tests) - 1} more files" if tests[1:] else ""
            title = f"{package}: which functions do the tests in {tests[0]}{also} enter?"
            with log.step(title), self.tree() as tree:
                entered = tree.enter("pipeline", tests)
            trials.keep_map(self.root, key, entered)
        if entered.unsound:
            log.say(f"  left out, they fail unchanged: {', '.join(entered.unsound)}")
        return entered


def killed_in(output: Path) -> set[tuple[str, ...]]:
    """The names of those that an earlier run's `--json` lists as killed."""
    try:
        return {
            tuple(m[field] for field in ("file", "function", "before", "after"))
            for report in json.loads(output.read_text(encoding="utf-8"))
            for m in report["mutants"]
            if m["outcome"] == "killed"
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotTest(f"{output}: is no output of --json ({error!r})") from error


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """What follows `--`."""
    parser = argparse.ArgumentParser(
        prog="nox -s mutants --",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("package", nargs="+", help="folders or modules of pipeline/")
    parser.add_argument("--sample", type=int, default=60, help="mutants per package (default: 60)")
    parser.add_argument("--seed", type=int, default=120, help="fixes the sample (default: 120)")
    parser.add_argument("--file", action="append", help="only mutants of this file; repeatable")
    parser.add_argument(
        "--again",
        type=Path,
        metavar="JSON",
        help="try only what that output of --json does not list as killed",
    )
    parser.add_argument(
        "--tests", action="append", metavar="PATH", help="tests to use (default: the package's own)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants side by side (default: 1)")
    parser.add_argument(
        "--at-least", type=float, default=90, metavar="PERCENT", help="fail below (default: 90)"
    )
    parser.add_argument("--json", action="store_true", help="print every mutant as JSON")
    options = parser.parse_args(words)
    if options.sample < 1 or options.jobs < 1:
        parser.error("--sample and --jobs are at least 1")
    if options.file:
        options.file = [os.path.relpath(Path(f).resolve(), ROOT) for f in options.file]
    return options


def run(root: Path, options: argparse.Namespace) -> list[PackageReport]:
    """Try the packages one after another."""
    with trials.scratch_folder() as folder:
        job = Run(root, folder, options)
        return [job.report(package) for package in options.package]


def main() -> int:
    """Exit code 0 where enough were found, 1 where not, 2 where nothing could be judged."""
    options = arguments()
    # a shell starts what runs in its background with SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        reports = run(ROOT, options)
    except (CannotTest, PipelineError) as why:
        print(f"mutants: {why}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, Stopped):
        print("mutants: stopped; nothing was left behind", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps([report.dump() for report in reports], indent=1))
    print(tell(reports), file=sys.stderr if options.json else sys.stdout)
    return 0 if all(report.percent >= options.at_least for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
