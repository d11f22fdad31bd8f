"""A whole run: self-test, warm-up, trials, repeats; kept after each trial, so it can resume."""

from __future__ import annotations

import platform
import resource
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from pipeline import __version__
from pipeline.artifacts.attest.statement import stamp
from pipeline.core import log
from pipeline.core.errors import BenchNotMeasured, BenchUnanswered, RunInvalid, WorkloadInvalid
from pipeline.core.files import cores
from pipeline.core.model import sha256_of
from pipeline.core.net import framing
from pipeline.serving.bench import model, record
from pipeline.serving.bench.answer import EVENT_LOOP, JSON_READER
from pipeline.serving.bench.marks import TrialChecks, client_marks, sample_marks
from pipeline.serving.bench.metrics import intervals, trial_metrics
from pipeline.serving.bench.model import BenchRun, Cell, Inputs, Mark, SelfTest, ServerFacts, Trial
from pipeline.serving.bench.place import RUN_FILE
from pipeline.serving.bench.plan import TokenScale, WorkerJob, cells_of
from pipeline.serving.bench.record import measured_alone, read_run, write_run
from pipeline.serving.bench.results.recompute import require_as_measured
from pipeline.serving.bench.self_test import measure_self
from pipeline.serving.bench.server import MeasuredServer, Sampler, server_facts
from pipeline.serving.bench.workers import SweepProgress, Workers
from pipeline.serving.bench.workload import RandomTokens, Workload

_DRAIN_S = 120.0
# A server that has just begun may compile kernels for its first request. A whole answer has this
# long, so that nothing waits for one that never ends.
_FIRST_ANSWER_S = 300.0
# Of a rate without a bound, the streams that the client measures itself with.
_RATE_STREAMS = 256
# A few characters have several tokens, so that an event may wait for the next.
_TOKENS_PER_EVENT = 1.2
# Sockets beside those of the streams: pipes, files, the stub's own end is another process.
_OTHER_FILES = 64


@dataclass
class Bench:
    """One server, one workload, one folder."""

    server: MeasuredServer
    workload: Workload
    folder: Path
    inputs: Inputs
    model: str | None = None
    speculates: bool | None = None  # what a recipe says of it
    settings: dict[str, str] = field(default_factory=dict)  # the same, by name
    restart: Callable[[], MeasuredServer] | None = None  # for a workload with several starts
    workers: int | None = None  # none: as many as the self-test finds
    self_test: bool = True
    prompt_file: Path | None = None
    sample_every_s: float = 1.0
    drain_s: float = _DRAIN_S
    _warm: set[str] = field(default_factory=set)  # cells, in this start of the engine
    _start: int | None = None  # which start of the engine this is, where there are several

    def run(self) -> BenchRun:
        """Runs from the first cell, or from where an earlier run stopped."""
        cells, facts = self._asked()
        with measured_alone(self.folder):
            self._run = self._begun(facts)
            if self._run.state == "complete":
                log.say(
                    f"The run in {self.folder} is finished: nothing is measured."
                    " --output with another folder measures again."
                )
                return self._run
            with self._written_on_failure():
                self._test_self(cells)
                self._measure_scale(facts)
                progress = SweepProgress(cells, self.workload.repeats)
                for cell in cells:
                    progress.skip(cell, self._good(cell))
                starts, is_first, void = self.workload.engine_starts, True, set[str]()
                for number in range(starts):
                    # each start of the engine has its share of the trials
                    share = self.workload.repeats * (number + 1) // starts
                    left = [c for c in cells if self._good(c) < share and c.name not in void]
                    if left and starts > 1:
                        known = (t.start for c in self._run.cells for t in c.trials)
                        # a resumed run continues in a further start
                        self._start = max((n for n in known if n is not None), default=-1) + 1
                        self._warm.clear()
                    if left and self.restart and not is_first:
                        with log.step(f"Starting the engine anew, {number + 1} of {starts}"):
                            self.server = self.restart()
                            now = server_facts(self.server, facts.model)
                        if now.version != facts.version:
                            raise RunInvalid(f"was {facts.version} before, and is {now.version}")
                    is_first = is_first and not left
                    for cell in left:
                        while self._good(cell) < share and cell.name not in void:
                            self._run_next(cell, progress)
                            # a cell ends with its first void trial
                            void |= {c.cell.name for c in self._run.cells if c.state == "void"}
            return self._write(state="complete", why_partial="")

    def _good(self, cell: Cell) -> int:
        return sum(len(c.good_trials) for c in self._run.cells if c.cell.name == cell.name)

    def _asked(self) -> tuple[list[Cell], ServerFacts]:
        with log.step(f"Asking {self.server.url} what it serves"):
            facts = server_facts(self.server, self.model)
        if facts.speculation is None:
            facts = facts.model_copy(update={"speculation": self.speculates})
        # what the server says itself counts
        settings = {**self.settings, **facts.settings}
        facts = facts.model_copy(update={"settings": settings})
        # a load whose numbers would mislead
        if isinstance(self.workload.prompts, RandomTokens) and facts.speculation is not False:
            known = "speculates" if facts.speculation else "does not say whether it speculates"
            raise WorkloadInvalid(
                f"{self.workload.name}: random tokens, and the server {known}: how many draft"
                " tokens are accepted then says nothing of text (vllm-project/vllm#51009)",
                "Take a workload with text; or say --no-speculation where you know that there is"
                " none.",
            )
        cells = cells_of(self.workload)
        streams = max((each.concurrency or _RATE_STREAMS for each in cells), default=1)
        if streams + _OTHER_FILES > (most := _open_files()):
            raise BenchNotMeasured(
                f"{streams} connections are asked for, and this machine allows {most} open files",
                "Raise the limit (`ulimit -Hn`, LimitNOFILE=), or ask for fewer.",
            )
        return cells, facts

    def _begun(self, facts: ServerFacts) -> BenchRun:
        """Begins a run, or resumes one of the same inputs; void trials are tried again."""
        if not (self.folder / RUN_FILE).exists():
            where = f"{self.server.url} with {self.workload.name}"
            log.say(f"Measuring {where}, results in {self.folder}")
            run = begun_run(self.workload, self.inputs, facts)
            return run.model_copy(update={"nonce": secrets.token_hex(4)})
        run = read_run(self.folder)
        # a run resumes only if all that decides its numbers is the same
        before, now = run.inputs.model_dump(), self.inputs.model_dump()
        named = {"recipe_name": "recipe", "recipe": "recipe", "host": "host (--host-facts)"}
        named["host_name"] = "host (--on)"
        both = dict.fromkeys([*before, *now])
        others = [named.get(name, name) for name in both if before.get(name) != now.get(name)]
        for what, name in (("model", "model"), ("version of the server", "version")):
            there, here = getattr(run.server, name), getattr(facts, name)
            others += [f"{what} ({there}, now {here})"] if there != here else []
        was, client = run.client.model_dump(), client_facts().model_dump()
        if changed := [name for name in was if was[name] != client[name]]:
            others.append(f"client ({', '.join(changed)})")
        if others:
            differing = " and another ".join(dict.fromkeys(others))
            raise RunInvalid(
                f"{self.folder}: holds a run with another {differing}",
                "Name another folder with --output.",
            )
        # before anything is added to it, and before a finished one is stated anew
        with log.watched(f"Reading the requests in {self.folder}"):
            require_as_measured(self.folder, run)
        if run.state == "complete" and all(each.state == "good" for each in run.cells):
            return run
        log.say(f"Going on with the run in {self.folder}")
        more = {"state": "partial", "interruptions": run.interruptions + 1}
        return run.model_copy(update=more)

    @contextmanager
    def _written_on_failure(self) -> Iterator[None]:
        """Writes on a failure how far the run came."""
        try:
            yield
        except KeyboardInterrupt:
            self._write(why_partial="stopped by Ctrl-C or a signal")
            raise
        except Exception as error:
            self._write(why_partial=" ".join(str(error).split())[:300])
            raise

    def _write(self, **changes: object) -> BenchRun:
        changes["ended"] = stamp()
        self._run = self._run.model_copy(update=changes)
        write_run(self.folder, self._run)
        return self._run

    def _test_self(self, cells: Sequence[Cell]) -> None:
        """Tests the client once for each concurrency."""
        known = {test.concurrency for test in self._run.self_tests}
        streams = {_streams(cell) for cell in cells} if self.self_test else set()
        for concurrency in sorted(streams - known):
            with log.step(f"Measuring the client itself with {log.count(concurrency, 'stream')}"):
                test = measure_self(concurrency, self.workers)
            log.say(f"  {sentence(test)}")
            self._run = self._run.model_copy(update={"self_tests": [*self._run.self_tests, test]})

    def _measure_scale(self, facts: ServerFacts) -> None:
        self._scale, seed = TokenScale(), self.workload.seed
        if self.workload.prompts.kind in ("file", "random-tokens"):
            return
        # nothing is queued yet, so that a deep queue is no reason to wait longer
        limit_s = min(self.workload.limits.first_token_s, _FIRST_ANSWER_S)
        with log.step("Measuring how many tokens a word has with this model"):
            self._scale = self.server.scale(facts.model, seed, limit_s, facts.context_tokens)

    def _run_next(self, cell: Cell, progress: SweepProgress) -> bool:
        """Measure the next trial of a cell; return whether there is one more."""
        done, repeats = {each.cell.name: each for each in self._run.cells}, self.workload.repeats
        known = done.get(cell.name)
        # a cell ends with its first void trial
        trials = known.good_trials if known else []
        if len(trials) >= repeats:
            return False
        repeated, again = list(known.repeated) if known else [], list[Mark]()
        for void in (trial for trial in known.trials if trial.void) if known else ():
            if void.requests.lines:
                repeated.append(void.requests)
            # a cell that is good at last must not hide that it was not at first
            again += [mark for mark in void.marks if mark.kind == "repeated"]
            message = f"trial {void.number + 1} was void before: {'; '.join(void.void)}"
            again.append(Mark(kind="repeated", message=message))
        trial = self._run_trial(cell, len(trials), progress)
        trials.append(trial.model_copy(update={"marks": [*trial.marks, *again]}))
        is_whole = len(trials) >= repeats
        done[cell.name] = model.CellResult(
            cell=cell,
            state="void" if trial.void else "good" if is_whole else "partial",
            trials=trials,
            intervals=intervals(trials),
            repeated=repeated,
        )
        self._write(cells=list(done.values()))
        if not trial.void:
            return not is_whole
        # repeating it would only show the same; does the server answer at all?
        try:
            server_facts(self.server, self._run.server.model)
        except BenchUnanswered as error:
            good = sum(len(each.good_trials) for each in self._run.cells)
            why = self.server.lost or "it has no list of models any more"
            raise BenchUnanswered(
                f"{self.server.url}: the server went away during {cell.name}, trial {len(trials)}:"
                f" {why}; {log.count(good, 'trial')} before it {'is' if good == 1 else 'are'} kept",
                "Serve it again, then run the same command: it goes on with that trial.",
            ) from error
        progress.skip(cell, repeats - len(trials))
        return False

    def _run_trial(self, cell: Cell, number: int, progress: SweepProgress) -> Trial:
        warmed, cold = 0, []
        # once in a cell, and again when the run resumes: the server may be a fresh one
        if cell.name not in self._warm:
            wanted = self.workload.warmup_requests
            warmed = min(_streams(cell), cell.requests) if wanted is None else wanted
        if warmed:
            # the same kind of requests with other prompts, which are not kept
            tally, jobs = TrialChecks(self.workload), self._jobs(cell, 0, None, warm_up=warmed)
            title = f"{cell.name}: warming up with {log.count(warmed, 'request')}"
            with log.step(title), Workers(jobs) as workers:
                for _ in tally.through(workers.rows()):
                    pass
            cold = [f"warm-up: {why}" for why in tally.failures()]
        self._warm.add(cell.name)
        with log.watched("Waiting until the server has ended all requests"):
            idle, drained_s = self.server.wait_until_idle(self.drain_s)
        test = next((t for t in self._run.self_tests if t.concurrency == _streams(cell)), None)
        tally, started = TrialChecks(self.workload), stamp()
        # a server that failed in the warm-up is not measured: the trial is void without a request
        jobs = [] if cold else self._jobs(cell, number, test)
        sampler = Sampler(self.server, self.sample_every_s)
        with Workers(jobs) as workers, sampler, progress.trial(cell, number) as advance:
            rows = tally.through(workers.rows(advance))
            lines = record.append_rows(self.folder, rows, record.end_of_rows(self._run))
        samples = sampler.samples()
        rows = record.read_request_rows(self.folder, lines)
        metrics = trial_metrics(rows, self.workload.objectives, samples)
        marks = client_marks(test, workers.efforts, metrics.output_tok_s)
        marks += [*tally.marks(), *sample_marks(samples, metrics)]
        each = metrics.tokens_per_chunk or 0.0
        if each > _TOKENS_PER_EVENT and not self._run.server.speculation:
            why = "it bills more than it writes, or streams in intervals"
            message = f"an event has {each:.1f} tokens by the server's count: {why}"
            marks.append(Mark(kind="tokens-together", message=message))
        if idle is False:
            message = f"the server was still busy after {drained_s:.0f} s: others use it"
            marks.append(Mark(kind="not-drained", message=message))
        void = [*cold, *tally.void(sum(effort.unsent for effort in workers.efforts))]
        if cell.reads and not void and metrics.decode_kept is None:
            when = "while nobody read" if metrics.decode_alone_tok_s is None else "beside a read"
            void.append(f"no writer decoded {when}: there is no rate to compare")
        progress.ended(cell, metrics, void)
        return Trial(
            number=number,
            start=self._start,
            started=started,
            metrics=metrics,
            marks=marks,
            void=void,
            samples=samples,
            requests=lines,
            warmup_requests=warmed,
            drained_s=round(drained_s, 3) if idle is not None else None,
        )

    def _jobs(
        self, cell: Cell, number: int, test: SelfTest | None, warm_up: int = 0
    ) -> list[WorkerJob]:
        # reader and writers wait for each other in one process
        count = 1 if cell.reads else self.workers or (test.workers if test else 1)
        return [
            WorkerJob(
                address=self.server.address,
                headers=dict(self.server.headers),
                model=self._run.server.model,
                workload=self.workload,
                cell=cell,
                phase="warm-up" if warm_up else "trial",
                trial=number,
                # a server that is still running knows the prompts of the repeated trial
                nonce=f"{self._run.nonce} {self._run.interruptions}",
                requests=warm_up or cell.requests,
                worker=worker,
                workers=count,
                scale=self._scale,
                prompt_file=str(self.prompt_file) if self.prompt_file else None,
            )
            for worker in range(count)
        ]


def measure_in_turns(first: Bench, second: Bench) -> list[BenchRun]:
    """Measure two servers, a trial of each in turn: what drifts, drifts for both.

    The order reverses each time, so that a steady drift cancels out.
    """
    both, token = (first, second), secrets.token_hex(8)
    with ExitStack() as stack:
        for bench in both:
            cells, facts = bench._asked()
            stack.enter_context(measured_alone(bench.folder))
            if (bench.folder / RUN_FILE).exists():
                raise RunInvalid(
                    f"{bench.folder}: holds a run, and turns cannot be gone on with",
                    "Name another folder with --output.",
                )
            bench._run = bench._begun(facts).model_copy(update={"turns": token})
            stack.enter_context(bench._written_on_failure())
        first._test_self(cells)
        second._run = second._run.model_copy(update={"self_tests": first._run.self_tests})
        for bench in both:
            bench._measure_scale(bench._run.server)
        progress = SweepProgress(cells, 2 * first.workload.repeats)
        for cell in cells:
            for number in range(first.workload.repeats):
                turn = both if number % 2 == 0 else both[::-1]
                more = [bench._run_next(cell, progress) for bench in turn]
                if not all(more):
                    break
        return [bench._write(state="complete", why_partial="") for bench in both]


def begun_run(workload: Workload, inputs: Inputs, facts: ServerFacts) -> BenchRun:
    """A run that has measured nothing yet."""
    now = stamp()
    return BenchRun(
        state="partial",
        why_partial="it has just begun",
        started=now,
        ended=now,
        workload=workload,
        inputs=inputs,
        server=facts,
        client=client_facts(),
        self_tests=[],
        cells=[],
    )


def _streams(cell: Cell) -> int:
    return min(cell.concurrency or _RATE_STREAMS, cell.requests)


def _open_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def sentence(test: SelfTest) -> str:
    """How good the client is, for people."""
    trust = "trusted" if test.trusted else "NOT trusted"
    return (
        f"error TTFT {test.ttft_error:+.2%}, TPOT {test.tpot_error:+.2%} at"
        f" {test.offered_tok_s:,.0f} tok/s; ceiling {test.ceiling_tok_s:,.0f} tok/s with"
        f" {log.count(test.workers, 'worker')}, {test.cpu_us_per_token:.0f} µs a token: {trust}"
    )


@cache
def client_facts() -> model.ClientFacts:
    """Describes this program on this machine."""
    # a number names the code that measured it
    folder = Path(__file__).parent
    sources = sorted([*folder.glob("*.py"), *folder.glob("*.yaml")])
    sources.append(Path(framing.__file__))  # that reads the answers
    return model.ClientFacts(
        version=__version__,
        digest=sha256_of(b"".join(path.read_bytes() for path in sources)),
        python=platform.python_version(),
        event_loop=EVENT_LOOP,
        json_reader=JSON_READER,
        machine=platform.machine(),
        cores=cores(),
        open_files=_open_files(),
    )
