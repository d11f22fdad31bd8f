"""Weights from elsewhere: look them up on the Hub, fetch them, serve them to other machines."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.app.signing import Signing
from pipeline.app.statements import FileStatement, state_weights
from pipeline.app.weights import backing_of, hints_of_folder, places_in
from pipeline.app.workspace import Workspace
from pipeline.core import errors, log
from pipeline.core.files import read_at_most, write_bytes
from pipeline.core.net.address import is_loopback
from pipeline.core.net.http import NetClient
from pipeline.core.sealed import read_or_none
from pipeline.hosts.fleet.playbook import promises_of
from pipeline.serving.fit.config import MOST_BYTES
from pipeline.serving.fit.source import HubModel, named_spec
from pipeline.weights import model
from pipeline.weights.check.repair import Repaired, RouteSupply, repair_known
from pipeline.weights.disk.install import name_revision
from pipeline.weights.disk.receipt import proved_identities
from pipeline.weights.hub import is_offline
from pipeline.weights.place import LockedFolder, kept_lock, new_place, offered_place
from pipeline.weights.serve.api import HubApi, ServedSets
from pipeline.weights.serve.http import Request, Response
from pipeline.weights.serve.prover import Prover
from pipeline.weights.serve.server import ConnectionLimits, HubServer, most_connections
from pipeline.weights.transfer.fetch import PlannedFile, fetch_files, plan_fetch
from pipeline.weights.transfer.lookup import (
    LockChange,
    LockResult,
    diff_weights_locks,
    look_up_now,
    open_hub,
    pinned_bytes,
)
from pipeline.weights.transfer.peers import PEER_STALL_S, PeerGroup
from pipeline.weights.transfer.router import NEIGHBOUR_TOKEN
from pipeline.weights.transfer.sources import named_folders, neighbour_route, open_routes
from pipeline.weights.transfer.workers import JOBS, Options

SHARE_PORT = 8790  # of hosts that an inventory names, unless --share names another
_MOST_PORT = 65535
# a file of tokens, not a disk image that was named by mistake
_MOST_TOKEN_BYTES = 1 << 20


@dataclass(frozen=True)
class FetchRequest:
    """A set to fetch, where to, and from where."""

    name: str  # of a spec, or ORG/MODEL[@REVISION]
    folder: Path
    hub_cache: bool = False
    neighbours: tuple[str, ...] = ()
    limit_rate: int | None = None
    jobs: int = JOBS
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    offline: bool = False
    peers: str | None = None  # an inventory, or addresses with commas between
    share: str | None = None  # ADDRESS:PORT where this host hands on what it has verified


@dataclass(frozen=True)
class Fetched:
    """A fetched set with verified files."""

    place: LockedFolder
    pins: Sequence[model.FilePin]
    brought: Sequence[model.FilePin]
    repaired: list[Repaired]
    statement: FileStatement | None  # none where only a part was asked for
    origin_bytes: int | None = None  # of a fetch with peers: what came from the origin,
    peer_bytes: int | None = None  # and what from other hosts


@dataclass(frozen=True)
class FetchPlan:
    """What a fetch would download."""

    place: LockedFolder
    files: list[PlannedFile]


def fetch(workspace: Workspace, request: FetchRequest) -> Fetched:
    """Download locked weights to a folder, and state the result; a file appears once verified.

    A model that is named as on the Hub needs neither a spec nor a lock.
    """
    # before hours of download: a named key that cannot sign is an error now
    signing = Signing()
    spec, place, pins = _to_fetch(workspace, request)
    lock = place.lock
    client, routes = open_routes(lock, neighbours=request.neighbours, offline=request.offline)
    statement = None
    with (
        hints_of_folder(
            "name another folder with --output", "Choose a folder you may write with --output."
        ),
        peers_of(workspace, request, place, client) as group,
    ):
        repaired = repair_known(place, pins, RouteSupply(routes, client))
        for file in repaired:
            log.say(f"  {file.path}: {file.error or file.how} ({log.size(file.fetched_bytes)})")
        options = Options(jobs=request.jobs, limit_bytes_per_s=request.limit_rate)
        brought = fetch_files(place, pins, routes, client=client, options=options, group=group)
        # after the files: a lock next to a folder says that the set is complete
        place.keep_lock()
        # so that engines which ask the cache for `main` find the locked commit
        name_revision(place, spec.revision)
        # a part of a set gives no statement about the whole
        if not request.only and not request.exclude:
            by_receipt = len(pins) - len(brought)
            statement = state_weights(place, signing, read=len(brought), by_receipt=by_receipt)
        if group is None:
            return Fetched(place, pins, brought, repaired, statement)
        if request.share:
            # the files are whole and stated: Ctrl-C only ends the sharing
            with suppress(KeyboardInterrupt):
                group.wait()
        came = group.origin_bytes, group.peer_bytes
        return Fetched(place, pins, brought, repaired, statement, *came)


@contextmanager
def peers_of(
    workspace: Workspace, request: FetchRequest, place: LockedFolder, client: NetClient
) -> Iterator[PeerGroup | None]:
    """Yield the hosts that fetch the same set, and serve them if --share asks for it."""
    if request.peers is None and request.share is None:
        yield None
        return
    if request.peers and request.offline:
        raise errors.SpecInvalid(
            "--peers asks other hosts, and --offline allows no network",
            "Leave one out. Without the internet, HF_ENDPOINT may name a `weights serve` nearby.",
        )
    host, _, port = (request.share or f"127.0.0.1:{SHARE_PORT}").rpartition(":")
    if not host or not port.isdecimal() or int(port) > _MOST_PORT:
        raise errors.SpecInvalid(
            f"--share {request.share}: is not ADDRESS:PORT",
            f"Name an address of this host that its peers reach, such as 10.0.0.7:{SHARE_PORT}.",
        )
    named = request.peers or ""
    addresses = [each.strip() for each in named.split(",") if each.strip()]
    if named and "://" not in named:
        # every host of a rack shares at the same port
        with promises_of(workspace.checkout(), ["--inventory", named], "connection.yml") as hosts:
            found = [_name(each.connection.address) for each in hosts]
        addresses = [f"http://{each}:{port}" for each in dict.fromkeys(found)]
    lock = place.lock
    group = PeerGroup(
        place,
        client,
        [neighbour_route(client, lock, a, "--peers", PEER_STALL_S) for a in addresses],
    )
    if request.share is None:
        with group.running():
            yield group
        return
    token = os.environ.get(NEIGHBOUR_TOKEN)
    host, served = host.strip("[]"), ServedSets([place])
    tokens = frozenset([token] if token else [])
    is_closed = is_loopback(f"[{host}]")
    hub = HubApi(served, Prover([]), tokens, only_loopback=is_closed, holder=group)
    server = HubServer(hub.answer, host, int(port), may_read=hub.may_read, is_quiet=True)
    server.listen()
    log.say(f"sharing at http://{_name(host)}:{server.port} until the fetch is over")
    if not tokens and not is_closed:
        log.say(
            f"everybody who reaches this address can read the weights; {NEIGHBOUR_TOKEN} on all"
            " hosts restricts that"
        )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        with group.running():
            yield group
    finally:
        server.close()


def plan_set(workspace: Workspace, request: FetchRequest) -> FetchPlan:
    """Plan what a fetch would download; write nothing."""
    Signing()
    _, place, pins = _to_fetch(workspace, request)
    options = Options(jobs=request.jobs, limit_bytes_per_s=request.limit_rate)
    return FetchPlan(place, plan_fetch(place, pins, options))


def _to_fetch(
    workspace: Workspace, request: FetchRequest
) -> tuple[model.WeightsSpec, LockedFolder, Sequence[model.FilePin]]:
    """Choose the checkout's lock, else one next to files, else the Hub's current state."""
    name = request.name
    known = workspace.checkout_or_none() if model.is_reference(name) else workspace.checkout()
    spec = named_spec(known, name) if known else model.weights_spec(name)
    has_lock = known and model.lock_path(known, spec.name).exists()
    lock = None if has_lock else _beside_files(spec, request)
    if lock is None and known and (has_lock or not model.is_reference(name)):
        lock = model.current_weights_lock(known, name)
    if lock is None:
        looked = look_up_now(spec, offline=request.offline)
        for warning in looked.warnings:
            log.say(f"warning: {warning}")
        lock = looked.lock
        log.say(f"  {spec.repository}: commit {lock.commit}")
    pins = model.chosen_files(lock, request.only, request.exclude)
    return spec, new_place(request.folder, lock, hub_cache=request.hub_cache), pins


def _beside_files(spec: model.WeightsSpec, request: FetchRequest) -> model.WeightsLock | None:
    """Find the lock at the target or, if the Hub may not be asked, at a source."""
    name = request.name
    if model.is_reference(name) and (lock := kept_lock(request.folder, spec)):
        log.say(f"{spec.repository}: commit {lock.commit}, as this folder has it")
        return lock
    if not request.offline and not is_offline():
        return None
    if place := offered_place(named_folders(request.neighbours), spec):
        commit = f"{spec.repository}: commit {place.lock.commit}"
        log.say(f"{commit}, by the lock in {place.root}, as there is none in a checkout")
        return place.lock
    if model.is_reference(name):
        return None
    raise errors.LockMissing(
        f"{spec.name}: has no lock, neither in the checkout nor in a folder of --from",
        f"Make it where the Hub can be reached (`sm120 weights lock {name}`), or name with --from a"
        " folder that `sm120 weights fetch` made.",
    )


def ask_hub(repository: str, revision: str) -> HubModel:
    """Ask the Hub what a repository holds at a revision now."""
    if is_offline():
        raise errors.OfflineMiss(f"{repository}: HF_HUB_OFFLINE is set", "Unset it to ask the Hub.")
    # the question is small, and the caller has other sources than to wait
    hub, read_file = open_hub(patient=False)
    with log.step(f"Looking up {repository} at {revision}"):
        commit = hub.commit_of(repository, revision)
        files = hub.files(repository, commit)

    def read(pin: model.FilePin) -> bytes:
        if pin.size_bytes > MOST_BYTES:
            raise errors.ModelUnreadable(f"{pin.path}: is larger than 16 MiB")
        return pinned_bytes(pin, read_file(repository, commit, pin))

    return HubModel(repository, commit, files, read)


def list_sets(workspace: Workspace) -> list[dict[str, Any]]:
    """The weights that a checkout knows, and which are locked."""
    checkout, rows = workspace.checkout(), []
    for name in model.spec_names(checkout):
        spec = model.read_spec(checkout, name)
        row: dict[str, Any] = {
            "name": name,
            "repository": spec.repository,
            "revision": spec.revision,
            "format": spec.format,
            "quant": spec.quant,
            "lock": "current",
        }
        try:
            lock = model.current_weights_lock(checkout, name)
            row |= {"commit": lock.commit, "files": len(lock.files), "bytes": lock.size_bytes}
        except errors.LockUnusable as error:
            row["lock"] = error.state
        rows.append(row)
    known = {row["name"] for row in rows}
    # locks of models that were named by their repository
    return rows + [
        {
            "name": lock.name,
            "repository": lock.repository,
            "lock": "current",
            "commit": lock.commit,
            "files": len(lock.files),
            "bytes": lock.size_bytes,
        }
        for lock in model.kept_locks(checkout)
        if lock.name not in known
    ]


@dataclass(frozen=True)
class LockedSet:
    """A lock as the Hub has it now, and what changed in it."""

    looked: LockResult
    moves: list[LockChange]
    spec_file: Path | None = None  # of a spec of the user's own, below the checkout


def lock_sets(
    workspace: Workspace,
    names: Sequence[str],
    own: model.WeightsSpec | None = None,
    *,
    dry_run: bool = False,
) -> list[LockedSet]:
    """Look up the commit of weights, and the size and hash of every file; write their locks.

    `own` is a spec of the user's to write and lock instead of `names`.
    """
    checkout = workspace.checkout()
    if not names:
        raise errors.SpecInvalid("no weights are named", "`sm120 weights list` shows the names.")
    specs = [named_spec(checkout, name) for name in dict.fromkeys(names)]
    done, spec_file = [], None
    # looks up all before writing the first
    looked_up = [(spec, look_up_now(spec)) for spec in ([own] if own else specs)]
    for spec, looked in looked_up:
        path = model.lock_path(checkout, spec.name)
        moves = diff_weights_locks(read_or_none(model.read_weights_lock, path), looked.lock)
        if not dry_run:
            # the spec first: a lock without it would be that of a model without a spec
            if own:
                spec_file = model.spec_path(checkout, own.name)
                fields = spec.model_dump(exclude_defaults=True)
                # for people to edit
                text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)
                write_bytes(spec_file, text.encode())
                spec_file = spec_file.relative_to(checkout.root)
            model.write_weights_lock(path, looked.lock)
        done.append(LockedSet(looked, moves, spec_file))
    return done


def own_spec(
    workspace: Workspace, reference: str, name: str, include: Sequence[str], exclude: Sequence[str]
) -> model.WeightsSpec:
    """Make a spec for a Hub model under the user's name for it; raise ValidationError."""
    checkout = workspace.checkout()
    if name in model.spec_names(checkout):
        raise errors.SpecInvalid(
            f"{model.spec_path(checkout, name)}: is there already",
            f"Edit it and run `sm120 weights lock {name}`, or save under another name.",
        )
    changes = {"name": name, "include": list(include) or ["*"], "exclude": list(exclude)}
    return model.WeightsSpec.model_validate(model.weights_spec(reference).model_dump() | changes)


def check_weights_locks(workspace: Workspace, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Check that locks match their specs; needs no network."""
    checkout, rows = workspace.checkout(), []
    # without names, the sets that have a lock; the others are only specs so far
    locked = (
        name for name in model.spec_names(checkout) if model.lock_path(checkout, name).exists()
    )
    for name in names or locked:
        named_spec(checkout, name)
        lock = model.current_weights_lock(checkout, name)
        count = {"files": len(lock.files), "bytes": lock.size_bytes}
        rows.append({"name": name, "commit": lock.commit, "seal": lock.seal, **count})
    return rows


@dataclass(frozen=True)
class ServedHub:
    """A Hub that listens."""

    endpoint: str
    sets: ServedSets
    is_open: bool  # to everybody who reaches its address
    run: Callable[[], None]  # answers until Ctrl-C


@contextmanager
def serve_hub(
    workspace: Workspace,
    folders: Sequence[Path],
    *,
    host: str = "127.0.0.1",  # closed by default: the licences of many weights forbid to share them
    port: int = 8080,
    token_file: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    answer_first: Callable[[Request], Response | None] = lambda request: None,
) -> Iterator[ServedHub]:
    """Serve folders of locked weights as a read-only Hub; Ctrl-C ends the block.

    `answer_first` answers what is not the Hub's, for clients that may read.
    """
    tls: ssl.SSLContext | None = None
    # first: report a wrong certificate before looking through many files
    if tls_cert:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            tls.load_cert_chain(tls_cert, tls_key)
        except (OSError, ssl.SSLError) as error:
            raise errors.AddressUnusable(
                f"{tls_cert.name}: cannot be used for TLS: {error}",
                "Give a PEM certificate with its own key (--tls-key).",
            ) from error
    places = [place for folder in folders for place in places_in(workspace, folder)]
    for place in places:
        log.say(f"{place.lock.name}: {backing_of(workspace, place, strict=False).sentence()}")
    served = ServedSets(places)
    tokens = _tokens(token_file) if token_file else frozenset()
    # by the receipts, so that a set which was verified once is served at once
    prover, scheme = Prover(served.files, proved_identities), "https" if tls else "http"
    if unproved := sum(held.pin.size_bytes for held in served.files if held.state == "unproved"):
        log.say(
            f"{log.size(unproved)} are checked first; `sm120 weights verify` does that once for all"
        )
        prover.advance = log.LineBar("checking", unproved).advance
    hub = HubApi(served, prover, tokens, only_loopback=is_loopback(f"[{host}]"), scheme=scheme)

    def answer(request: Request) -> Response:
        own = answer_first(request) if hub.may_read(request) else None
        return own or hub.answer(request)

    connections = ConnectionLimits(most_connections())
    # where anybody may connect, one address must not use up all connections
    most_of_one = None if tokens else connections.most // 2
    server = HubServer(answer, host, port, tls, hub.may_read, most_of_one, connections)
    # before checking the files: report at once that an address is in use
    server.listen()
    try:
        prover.start()
        endpoint = f"{scheme}://{_name(server.host)}:{server.port}"
        is_open = not tokens and not is_loopback(f"[{server.host}]")
        yield ServedHub(endpoint, served, is_open, server.run)
    except KeyboardInterrupt:
        requests = log.count(server.requests, "request")
        log.say(f"stopped after {requests}, {log.size(server.sent_bytes)} sent")
    finally:
        prover.stop()
        server.close()


def _name(host: str) -> str:
    """The name by which clients reach this machine."""
    if host in ("0.0.0.0", "::", ""):  # noqa: S104 - only compared
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _tokens(path: Path) -> frozenset[str]:
    text = (read_at_most(path, _MOST_TOKEN_BYTES) or b"").decode(errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    tokens = frozenset(line for line in lines if line and not line.startswith("#"))
    # guessable by trying; and a client could not send spaces or other letters in a header
    if not tokens or any(len(t) < 8 or not t.isascii() or " " in t for t in tokens):
        raise errors.AddressUnusable(
            f"{path.name}: a token has at least eight ASCII characters and no spaces",
            "Make one with `openssl rand -hex 24`.",
        )
    if path.stat().st_mode & 0o077:
        log.say(f"{path.name} can be read by others on this machine; `chmod 600` it")
    return tokens
