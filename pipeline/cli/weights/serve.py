"""`sm120 weights serve`: a Hub for the other machines of a network."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import ssl
from pathlib import Path

import click

from pipeline import log
from pipeline.cli.options import EXISTING_FILE, EXISTING_FOLDER, json_option
from pipeline.cli.weights.places import backing_of, places_in
from pipeline.errors import AddressUnusable
from pipeline.files import read_at_most
from pipeline.weights.disk.receipt import proved_identities
from pipeline.weights.serve.api import HubApi
from pipeline.weights.serve.prover import Prover
from pipeline.weights.serve.served import ServedSets
from pipeline.weights.serve.server import ConnectionLimits, Server, most_connections

# a file of tokens, not a disk image that was named by mistake
_MOST_TOKEN_BYTES = 1 << 20


@click.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True, type=EXISTING_FOLDER)
# closed by default: the licences of many weights forbid to hand them on
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    default=8080,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--token-file", type=EXISTING_FILE, help="File of tokens that may read, one on each line."
)
@click.option("--tls-cert", type=EXISTING_FILE, help="Certificate (chain) for HTTPS, PEM.")
@click.option("--tls-key", type=EXISTING_FILE, help="Key of the certificate, PEM.")
@json_option
@click.pass_context
def serve(
    context: click.Context,
    folders: tuple[Path, ...],
    host: str,
    port: int,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    as_json: bool,
) -> None:
    """Serve folders of locked weights as a read-only Hub, until Ctrl-C.

    Clients set HF_ENDPOINT to the printed address. Only files of the locks are served, and each
    only while its bytes are proved: by the receipt of `weights verify`, or by a background check.
    """
    # first: a wrong certificate is known before many files are looked through
    tls = _tls(tls_cert, tls_key)
    places = [place for folder in folders for place in places_in(context, folder)]
    for place in places:
        log.say(f"{place.lock.name}: {backing_of(context, place, strict=False).sentence()}")
    served = ServedSets(places)
    tokens = _tokens(token_file) if token_file else frozenset()
    prover = _prover(served)
    scheme = "https" if tls else "http"
    hub = HubApi(served, prover, tokens, only_loopback=_is_loopback(host), scheme=scheme)
    connections = ConnectionLimits(most_connections())
    # where anybody may connect, one address must not use up all connections
    most_of_one = None if tokens else connections.most // 2
    server = Server(hub.answer, host, port, tls, hub.may_read, most_of_one, connections)
    # before the files are checked: that an address is in use is known at once
    server.listen()
    try:
        prover.start()
        _announce(server, served, as_json=as_json, guarded=bool(tokens))
        server.run()
    except KeyboardInterrupt:
        requests = log.count(server.requests, "request")
        log.say(f"stopped after {requests}, {log.size(server.sent_bytes)} sent")
    finally:
        prover.stop()
        server.close()


def _prover(served: ServedSets) -> Prover:
    prover = Prover(served.files)
    # so that a set which was verified once is served at once
    prover.trust_receipts(proved_identities)
    if left := sum(held.pin.size_bytes for held in served.files if held.state == "unproved"):
        log.say(
            f"{log.size(left)} are checked first; `sm120 weights verify` does that once for all"
        )
        prover.advance = log.LineBar("checking", left).advance
    return prover


def _announce(server: Server, served: ServedSets, *, as_json: bool, guarded: bool) -> None:
    endpoint = f"{'https' if server.tls else 'http'}://{_name(server.host)}:{server.port}"
    if as_json:
        sets = [
            {"repository": s.repository, "commit": s.commit, "files": len(s.files)}
            for s in served.snapshots.values()
        ]
        # one line, at once: a program waits for it before it starts clients
        click.echo(json.dumps({"endpoint": endpoint, "pid": os.getpid(), "sets": sets}))
    else:
        for snapshot in served.snapshots.values():
            size = log.size(sum(held.pin.size_bytes for held in snapshot.files.values()))
            where = f"{snapshot.repository} at {snapshot.commit[:12]}"
            log.say(f"serving {where}: {log.count(len(snapshot.files), 'file')}, {size}")
        click.echo(f"export HF_ENDPOINT={endpoint}")
    if not guarded and not _is_loopback(server.host):
        log.say(
            "everybody who reaches this address can read the weights; --token-file restricts that"
        )


def _name(host: str) -> str:
    """The name by which clients reach this machine."""
    if host in ("0.0.0.0", "::", ""):  # noqa: S104 - only compared
        return socket.gethostname()
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _tls(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if cert is None:
        if key is not None:
            raise click.UsageError("--tls-key needs --tls-cert")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise AddressUnusable(
            f"{cert.name}: cannot be used for TLS: {error}",
            "Give a PEM certificate with its own key (--tls-key).",
        ) from error
    return context


def _tokens(path: Path) -> frozenset[str]:
    text = (read_at_most(path, _MOST_TOKEN_BYTES) or b"").decode(errors="replace")
    lines = [line.strip() for line in text.splitlines()]
    tokens = frozenset(line for line in lines if line and not line.startswith("#"))
    # guessable by trying; and a client could not send spaces or other letters in a header
    if not tokens or any(len(t) < 8 or not t.isascii() or " " in t for t in tokens):
        raise AddressUnusable(
            f"{path.name}: a token has at least eight ASCII characters and no spaces",
            "Make one with `openssl rand -hex 24`.",
        )
    if path.stat().st_mode & 0o077:
        log.say(f"{path.name} can be read by others on this machine; `chmod 600` it")
    return tokens
