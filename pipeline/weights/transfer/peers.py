"""Hosts of a rack that fetch the same set: each takes from the others what they have verified.

Hosts ask the origin (a neighbour, a mirror or the Hub) for blocks that no host has and no other
is fetching, so that it sends about one copy to all of them. They ask each other several times a
second what they hold. Nobody is in charge: others leave a host that is gone, slow or lying, and get
its blocks from elsewhere. Whatever anybody says, the hash in the lock decides.
"""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from urllib.parse import quote

from pipeline.core import log
from pipeline.core.errors import Interrupted
from pipeline.core.foreign_json import read_json
from pipeline.core.net.client import MAY_PASS
from pipeline.core.net.failures import NetError
from pipeline.core.net.http import NetClient
from pipeline.core.net.timing import HttpLimits
from pipeline.weights.disk.blocks import BlockList, HeldBlocks, all_blocks, block_bytes_of
from pipeline.weights.disk.hashing import FileUnreadable, open_pin
from pipeline.weights.model import FilePin
from pipeline.weights.place import LockedFolder
from pipeline.weights.transfer.router import (
    AttemptFailed,
    ByteStream,
    NotAvailable,
    wrong_bytes,
)
from pipeline.weights.transfer.sources import HttpRoute
from pipeline.weights.transfer.workers import (
    PIECE_BYTES,
    Lane,
    PartialFile,
    Span,
    WorkerPool,
)

PEER_STALL_S = 10.0  # without a byte for so long, the block comes from another
ASK_S = 0.25  # between two questions to a peer; with many peers longer
_ASK_A_PEER_S = 0.03
_GONE_S = 5.0  # without an answer for so long, a peer counts as gone
_PAUSE_S = 30.0  # of a peer that failed twice in a row: restarting, or overloaded
_IDLE_S = 20.0  # a host that received nothing for so long does not bring what it has asked for
_BLOCK_S = 60.0  # for one block of a peer, however it drips in
_MOST_OPEN = 2  # blocks of one peer at a time: its other peers want some, too
_WINDOW_BLOCKS = 1024  # from which the next is chosen; files are still finished one by one
_LIST_S = 20.0  # a file starts without a block list that takes longer
_LONGEST_WAIT_S = 600.0
_MOST_ANSWER_BYTES = 8 << 20  # the block list of a file of 1 TB
_POLL = HttpLimits(connect_s=3.0, silence_s=5.0, head_s=5.0, piece_s=5.0, grace_s=5.0)
_FIRST_ANSWERS_S = 10.0  # longer than those limits: for peers that do not answer at all
_LIST = HttpLimits(connect_s=5.0, silence_s=150.0, head_s=150.0)  # its server reads the whole file


@dataclass(eq=False)
class Peer:
    """Another host of the rack, and its last answer."""

    route: HttpRoute
    says: HeldBlocks | None = None
    bits: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)
    heard_s: float = 0.0  # when it answered last
    moved_s: float = 0.0  # when its number of bytes was last another
    answer_s: float = 1.0  # how long it takes to answer: the nearest is the fastest
    n_open: int = 0
    failures: int = 0
    paused_s: float = 0.0  # not asked for blocks until then
    lied: bool = False

    def is_there(self, now: float) -> bool:
        return self.says is not None and not self.lied and now - self.heard_s < _GONE_S


class PeerGroup:
    """The peers of one fetch, and what this host has for them."""

    def __init__(self, place: LockedFolder, client: NetClient, routes: Sequence[HttpRoute]) -> None:
        self._place, self._client = place, client
        self.host, self.block_bytes = secrets.token_hex(8), block_bytes_of(place.lock.size_bytes)
        self.peers = [Peer(route) for route in routes]
        self.partials: dict[str, PartialFile] = {}
        self.whole: set[str] = set()  # hashes of files that have their names
        self.asked: dict[str, int] = {}  # bits that come from the origin just now
        self.origin_bytes = self.peer_bytes = 0
        self.is_whole = False
        self.guard = threading.RLock()
        self._over = threading.Event()
        self._begun = threading.Semaphore(0)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ask the peers what they hold while the block lasts."""
        honest = [peer for peer in self.peers if not peer.lied]
        threads = [threading.Thread(target=self._ask, args=(p,), daemon=True) for p in honest]
        self._over.clear()
        try:
            for thread in threads:
                thread.start()
            # a host that starts without knowing what others fetch asks the origin for the same;
            # without an origin it would find nobody who has the files
            until = time.monotonic() + _FIRST_ANSWERS_S
            for _ in threads:
                self._begun.acquire(timeout=max(0.0, until - time.monotonic()))
            yield
        finally:
            self._over.set()

    def _ask(self, peer: Peer) -> None:
        """Ask one peer again and again."""
        repository, is_first = peer.route.repository, True
        url = f"{repository.endpoint}/api/models/{repository.name}/held/{repository.commit}"
        pause_s = max(ASK_S, _ASK_A_PEER_S * len(self.peers))
        while not self._over.is_set() and not peer.lied:
            begun_s = time.monotonic()
            try:
                says = self._answer(peer.route, f"{url}?block_bytes={self.block_bytes}", _POLL)
                held = HeldBlocks.model_validate(says)
                files = {want: int(bits, 16) for want, bits in held.files.items()}
                asked = {want: int(bits, 16) for want, bits in held.asked.items()}
                with self.guard:
                    now = time.monotonic()
                    if peer.says is None or peer.says.received_bytes != held.received_bytes:
                        peer.moved_s = now
                    peer.says, peer.bits, peer.asked, peer.heard_s = held, files, asked, now
                    peer.answer_s += (now - begun_s - peer.answer_s) / 4
                    # an inventory names this host, too
                    peer.lied |= held.host == self.host
            except (NetError, ValueError, Interrupted):
                pass  # it is not up yet, or gone, or something else: what others have is enough
            if is_first:
                self._begun.release()
                is_first = False
            self._over.wait(pause_s)

    def _answer(self, route: HttpRoute, url: str, limits: HttpLimits) -> object:
        """Read a small JSON answer; None if this machine gives none."""
        login = route.repository.login
        with self._client.ask("GET", url, headers=login, limits=limits) as answer:
            if answer.status in MAY_PASS:
                raise ValueError(f"answers {answer.status}")
            data = answer.read(_MOST_ANSWER_BYTES)
            if answer.status != 200:
                return None
        return read_json(data, most_bytes=_MOST_ANSWER_BYTES)

    def blocks(self, route: HttpRoute, pin: FilePin) -> tuple[str, ...] | None:
        """Get a machine's block list of a file; raise NetError or ValueError."""
        there = route.repository
        url = f"{there.endpoint}/api/models/{there.name}/blocks/{there.commit}/{quote(pin.path)}"
        found = self._answer(route, f"{url}?block_bytes={self.block_bytes}", _LIST)
        if found is None:
            return None
        blocks = BlockList.model_validate(found)
        n_blocks = -(-pin.size_bytes // self.block_bytes)
        if (blocks.block_bytes, len(blocks.sha256)) != (self.block_bytes, n_blocks):
            raise ValueError("has a block list of another size")
        return tuple(blocks.sha256)

    def there(self) -> list[Peer]:
        """The peers that answer, and that we may ask for blocks."""
        now = time.monotonic()
        return [p for p in self.peers if p.is_there(now) and now >= p.paused_s]

    def failed(self, peer: Peer, why: str, *, lied: bool = False) -> None:
        """Count a failure; never ask a peer that sent wrong bytes again, others after a while."""
        with self.guard:
            peer.failures += 1
            if peer.lied:
                return  # all of its blocks in transfer fail
            if lied:
                peer.lied = True
                log.say(f"  {peer.route.name}: {why}; it is not asked any more")
            elif peer.failures >= 2:
                peer.failures, peer.paused_s = 0, time.monotonic() + _PAUSE_S
                log.say(f"  {peer.route.name}: {why}; going on without it for {_PAUSE_S:.0f} s")

    def held(self) -> HeldBlocks:
        """What this host can share, as others ask for it."""
        with self.guard:
            sizes = {pin.want: pin.size_bytes for pin in self._place.lock.files}
            files = {want: partial.right for want, partial in self.partials.items()}
            files |= {w: all_blocks(sizes[w], self.block_bytes) for w in self.whole}
            return HeldBlocks(
                host=self.host,
                block_bytes=self.block_bytes,
                is_whole=self.is_whole,
                received_bytes=self.origin_bytes + self.peer_bytes,
                files={want: f"{bits:x}" for want, bits in files.items() if bits},
                asked={want: f"{bits:x}" for want, bits in self.asked.items() if bits},
            )

    def open_held(self, pin: FilePin, start: int, stop: int) -> int:
        """Open a handle on verified bytes."""
        with self.guard:
            is_whole, partial = pin.want in self.whole, self.partials.get(pin.want)
        if is_whole:
            return open_pin(self._place, pin)
        step = self.block_bytes
        wanted = all_blocks(stop, step) & ~all_blocks(start - start % step, step)
        is_right = partial is not None and partial.right & wanted == wanted
        if is_right and partial and (handle := partial.held(start, stop)) is not None:
            return handle
        raise FileUnreadable("is still being fetched")

    def have(self, wants: Iterable[str]) -> None:
        """Note that these files have their names now."""
        with self.guard:
            self.whole.update(wants)

    def wait(self) -> None:
        """Hand on what is here until no peer needs it any more; Ctrl-C ends it early."""
        begun_s, is_printed = time.monotonic(), False
        while (now := time.monotonic()) - begun_s < _LONGEST_WAIT_S:
            waiting = [
                p
                for p in self.peers
                if p.says and p.is_there(now) and not p.says.is_whole and now - p.moved_s < _IDLE_S
            ]
            # they know that this host is done only after they asked
            if not waiting and now - begun_s > 2 * ASK_S:
                return
            if waiting and not is_printed:
                log.say(
                    f"  serving {log.count(len(waiting), 'host')} still at work; Ctrl-C ends it"
                )
                is_printed = True
            self._over.wait(ASK_S)


@dataclass(eq=False)
class PeerPool(WorkerPool):
    """Transfers blocks: from peers where they have them, from the origin what nobody has."""

    group: PeerGroup

    def __post_init__(self) -> None:
        super().__post_init__()
        group = self.group
        self._origins = [route for route in self.router.routes if isinstance(route, HttpRoute)]
        self._taken: dict[tuple[str, int], Peer] = {}  # the peer asked for each block
        self._n_origin = 0
        self._givers: dict[str, Peer | None] = {}  # of a block list; none is the origin
        self._unlisted: set[str] = set()  # files without a block list so far
        self._doubted: set[str] = set()  # files with a false block list
        self._over = threading.Event()
        for partial in self.partial_files:
            # a file of one block needs no list: its own hash is that of the block
            if partial.pin.size_bytes <= group.block_bytes:
                partial.blocks = (partial.pin.want,)
        with group.guard:
            group.partials = {partial.pin.want: partial for partial in self.partial_files}

    def run(self) -> None:
        thread = threading.Thread(target=self._learn, daemon=True)
        thread.start()
        try:
            super().run()
        finally:
            self._over.set()

    def _learn(self) -> None:
        """Get the block list of each file: of the origin, else of a peer that has it whole."""
        group, begun_s, judged = self.group, time.monotonic(), set[str]()
        asked_all = set[str]()  # files of which no origin has a list
        while not self._over.is_set():
            files = sorted(group.partials.values(), key=lambda p: p.pin.size_bytes)
            for partial in files:
                pin, step = partial.pin, group.block_bytes
                if partial.blocks is not None or pin.want in self._doubted:
                    # judge an earlier run's blocks by the list, so that others can have them
                    if partial.kept_bytes and partial in self._begun and pin.want not in judged:
                        judged.add(pin.want)
                        for start in range(0, pin.size_bytes, step):
                            self._judge(partial, start, min(start + step, pin.size_bytes))
                    continue
                ways: list[tuple[HttpRoute, Peer | None]] = [(r, None) for r in self._origins]
                if pin.want in asked_all:
                    full = all_blocks(pin.size_bytes, step)
                    ways = [(p.route, p) for p in group.there() if p.bits.get(pin.want) == full]
                blocks, is_final = None, True
                for route, giver in ways:
                    try:
                        blocks = group.blocks(route, pin)
                    except (NetError, ValueError):
                        is_final = False  # busy, or it answers nonsense: another time
                    except Interrupted:
                        return
                    if blocks is not None:
                        self._givers[pin.want] = giver
                        break
                if is_final and blocks is None:
                    asked_all.add(pin.want)
                if blocks is not None:
                    partial.blocks = blocks
                elif is_final or time.monotonic() - begun_s > _LIST_S:
                    self._unlisted.add(pin.want)
                self._wake()
            self._over.wait(0.2)

    def _judge(self, partial: PartialFile, start: int, stop: int) -> None:
        """Judge a block that is on the disk already."""
        if partial.blocks is None or (handle := partial.held(start, stop)) is None:
            return
        try:
            data = os.pread(handle, stop - start, start)
        finally:
            os.close(handle)
        index = start // self.group.block_bytes
        if hashlib.sha256(data).hexdigest() == partial.blocks[index]:
            with self.group.guard:
                partial.right |= 1 << index

    def _distrust(self, partial: PartialFile) -> None:
        """Drop a file's block list, which is not that of the locked file."""
        want = partial.pin.want
        self._doubted.add(want)
        self._unlisted.add(want)
        with self.group.guard:
            partial.blocks, partial.right = None, 0
        why = f"its block list of {partial.pin.path} is of other bytes than the locked ones"
        if giver := self._givers.pop(want, None):
            self.group.failed(giver, why, lied=True)
        else:
            log.say(f"  the origin: {why}; going on without it")

    def _next_job(self, last: PartialFile | None) -> tuple[PartialFile, Span | None] | None:
        """Pick a block of a peer or the origin; no span if only the hash is left to do."""
        with self._changed:
            while not self.client.stop.is_set():
                n_blocks = sum(len(partial.todo()) for partial in self._begun)
                while self._new and n_blocks < _WINDOW_BLOCKS:
                    partial = self._new.popleft()
                    partial.begin()
                    self._begun.append(partial)
                    n_blocks += len(partial.todo())
                    if not partial.todo_bytes:
                        return partial, None
                if job := self._choose():
                    return job
                if not self._unfinished:
                    return None
                self._changed.wait(0.1)  # peers find out about new blocks all the time
        raise Interrupted("stopped")

    def _choose(self) -> tuple[PartialFile, Span] | None:
        """Choose the next block and whom to ask for it; the caller holds `_changed`.

        Each host first asks the origin for its own share of the blocks, by number. It asks peers
        for what is rarest, first those with no open request, then the nearest.
        """
        group, now = self.group, time.monotonic()
        peers, step = group.there(), group.block_bytes
        unfinished = [p for p in peers if p.says is not None and not p.says.is_whole]
        hosts = sorted({group.host, *(p.says.host for p in unfinished if p.says is not None)})
        rank, number = hosts.index(group.host), 0
        # a host that has stopped receiving will not deliver what it has asked for
        moving = [p for p in unfinished if now - p.moved_s < _IDLE_S]
        most = max(1, self.options.jobs // len(hosts))
        origin: tuple[tuple[float, ...], PartialFile, Span] | None = None
        best: tuple[tuple[float, ...], PartialFile, Span, Peer] | None = None
        for file_number, partial in enumerate(self._begun):
            want, is_listed = partial.pin.want, partial.blocks is not None
            todo, first = partial.todo(), number
            number += -(-partial.pin.size_bytes // step)
            if not todo or not (is_listed or want in self._unlisted):
                continue
            have = [(p, bits) for p in peers if (bits := p.bits.get(want, 0))]
            asked = 0
            for peer in moving:
                asked |= peer.asked.get(want, 0)
            # without a block list a file cannot be handed on before it is whole: one host has it
            is_others = not is_listed and not partial.fetched_bytes and bool(asked or have)
            for span in todo:
                bit = 1 << span[0] // step
                holders = [peer for peer, bits in have if bits & bit] if is_listed else []
                for peer in holders:
                    if peer.n_open < _MOST_OPEN:
                        near = peer.answer_s // 0.005  # of one switch, or farther away
                        key = (peer.n_open, len(holders), near, random.random())  # noqa: S311 - spreads load
                        if best is None or key < best[0]:
                            best = key, partial, span, peer
                # a host alone with a file takes it as a plain fetch does, over all connections
                may_ask = self._n_origin < (most if is_listed else self.options.jobs)
                if not may_ask or holders or is_others or (is_listed and asked & bit):
                    continue
                share = first + span[0] // step if is_listed else file_number
                order = random.random() if is_listed else span[0]  # noqa: S311
                chance = (share % len(hosts) != rank, not is_listed and file_number, order)
                if origin is None or chance < origin[0]:
                    origin = chance, partial, span
        # the origin first: while it waits for a question, nothing new comes to the rack
        if origin is not None:
            _, partial, span = origin
            self._n_origin += 1
            with group.guard:
                group.asked[partial.pin.want] = group.asked.get(partial.pin.want, 0) | (
                    1 << span[0] // step
                )
        elif best is not None:
            _, partial, span, peer = best
            peer.n_open += 1
            self._taken[partial.pin.want, span[0]] = peer
        else:
            return None
        partial.take(span)
        return partial, span

    def _transfer(self, partial: PartialFile, span: Span, lane: Lane) -> None:
        """Fetch a block from `_choose`'s choice; a later attempt fetches what does not come."""
        group, want = self.group, partial.pin.want
        if (peer := self._taken.get((want, span[0]))) is None:
            try:
                super()._transfer(partial, span, lane)
            finally:
                with self._changed, group.guard:
                    self._n_origin -= 1
                    group.asked[want] &= ~(1 << span[0] // group.block_bytes)
            return
        spans = [span]
        try:
            with closing(peer.route.open(partial.pin, *span)) as body:
                if body.is_whole:
                    raise AttemptFailed("sends the whole file instead of a block")
                self._write(partial, body, spans, lane)
            with group.guard:
                peer.failures = 0
        except AttemptFailed as failure:
            group.failed(peer, str(failure), lied=failure.error_type is not None)
        except NotAvailable as nothing:
            group.failed(peer, str(nothing.error))
        finally:
            del self._taken[want, span[0]]
            partial.give_back(spans)
            with self._changed:
                peer.n_open -= 1
            self._wake()

    def _write(self, partial: PartialFile, body: ByteStream, spans: list[Span], lane: Lane) -> None:
        """Judge a block in memory, and write it only if its hash is right."""
        if (blocks := partial.blocks) is None or body.is_whole:
            todo = sum(stop - start for start, stop in spans)
            try:
                return super()._write(partial, body, spans, lane)
            finally:
                with self.group.guard:
                    left = sum(stop - start for start, stop in spans)
                    self.group.origin_bytes += todo - left
        (start, stop), index = spans[0], spans[0][0] // self.group.block_bytes
        data, at = memoryview(bytearray(stop - start)), 0
        until = time.monotonic() + _BLOCK_S
        while at < len(data):
            at += self._throttle.read(body, data[at : at + PIECE_BYTES])
            lane.attempts.received()
            if time.monotonic() > until:
                raise AttemptFailed(f"sends {partial.pin.path} too slowly", is_stall=True)
        hasher = partial.pin.new_hash() if len(blocks) == 1 else hashlib.sha256()
        hasher.update(data)
        is_peers = (partial.pin.want, start) in self._taken
        if hasher.hexdigest() != blocks[index]:
            # The origin contradicts the list: its bytes are judged by the file's own hash.
            if not is_peers and len(blocks) > 1:
                self._distrust(partial)
            is_certain = is_peers or len(blocks) == 1
            raise AttemptFailed(
                f"sent wrong bytes of {partial.pin.path}",
                error_type=wrong_bytes if is_certain else None,
            )
        partial.write((start, stop), start, data)
        partial.note(start, stop)
        with self.group.guard:
            partial.right |= 1 << index
            self.group.peer_bytes += len(data) if is_peers else 0
            self.group.origin_bytes += 0 if is_peers else len(data)
        self.bar.advance(len(data))
        partial.fetched_bytes += len(data)
        spans.pop(0)

    def _finish(self, partial: PartialFile) -> None:
        """Finish a file; a wrong one with all blocks as listed had a false list."""
        is_right = partial.hash.digest == partial.pin.want
        if not is_right and partial.blocks is not None and len(partial.blocks) > 1:
            self._distrust(partial)
        super()._finish(partial)
        if is_right:
            self.group.have([partial.pin.want])
