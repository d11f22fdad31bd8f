"""What is looked at beside the requests while a trial runs, once a second."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

from pipeline import proc
from pipeline.bench.engine_metrics import Reading, series
from pipeline.bench.gpu import CardReading, gpu_series, read_cards
from pipeline.bench.model import Samples
from pipeline.bench.server import Server
from pipeline.known import Unknown

EVERY_S = 1.0
_SMI_LIMIT_S = 10.0
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass
class Sampler:
    """A thread that samples until its block ends."""

    server: Server
    every_s: float = EVERY_S
    engine: list[tuple[float, Reading]] = field(default_factory=list)
    cards: list[tuple[float, list[CardReading]]] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def __enter__(self) -> Sampler:
        self._stop = threading.Event()
        self._start = time.monotonic()
        self._smi = self._find_smi()
        if not self.server.has_metrics:
            self.absent.append("engine: it has no /metrics, or not in a form that is known")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        if kind is None:
            self._thread.join()
            # counters are compared with those after the last request
            self._look()

    def _find_smi(self) -> str | None:
        if self.server.address.socket or self.server.address.host not in _LOOPBACK:
            self.absent.append("GPUs: the server is on another machine")
            return None
        path = shutil.which("nvidia-smi")
        if path is None:
            self.absent.append("GPUs: nvidia-smi is not installed")
        return path

    def _run(self) -> None:
        while True:
            self._look()
            if self._stop.wait(self.every_s):
                return

    def _look(self) -> None:
        at = time.monotonic() - self._start
        if (reading := self.server.metrics()) is not None:
            self.engine.append((at, reading))
        if self._smi:
            at = time.monotonic() - self._start
            self._look_at_cards(self._smi, at)

    def _look_at_cards(self, smi: str, at: float) -> None:
        try:
            answer = proc.read([smi, "-q", "-x"], timeout_s=_SMI_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            self._give_cards_up(str(error))
            return
        cards = read_cards(answer.stdout.decode(errors="replace"))
        if isinstance(cards, Unknown):
            self._give_cards_up(cards.unknown)
        else:
            self.cards.append((at, cards))

    def _give_cards_up(self, why: str) -> None:
        self._smi = None
        self.absent.append(f"GPUs: {' '.join(why.split())[:200]}")

    def samples(self) -> Samples:
        """All that was seen."""
        return Samples(
            gpus=gpu_series(self.cards), engine=series(self.engine), absent=list(self.absent)
        )
