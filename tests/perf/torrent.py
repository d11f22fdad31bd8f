"""A seed or a peer of a v2 torrent, run by a Python that has libtorrent and nothing of ours.

    torrent.py make FOLDER FILE
    torrent.py seed|super|peer FILE FOLDER ADDRESS:PORT [ADDRESS:PORT ...]

The first address is its own. A peer prints `done` when it has every byte; all stay until their
input is closed, so that those that are not done can still take from them.
"""

import sys
import time
from pathlib import Path

import libtorrent as lt  # type: ignore[import-not-found]


def make(folder: Path, file: Path) -> None:
    storage = lt.file_storage()
    lt.add_files(storage, str(folder), lambda path: "/." not in path)
    torrent = lt.create_torrent(storage, 0, lt.create_torrent.v2_only)
    lt.set_piece_hashes(torrent, str(folder.parent))
    file.write_bytes(lt.bencode(torrent.generate()))


def run(role: str, file: Path, folder: Path, own: str, *others: str) -> None:
    session = lt.session(
        {
            "listen_interfaces": own,
            "enable_dht": False,
            "enable_lsd": False,
            "enable_upnp": False,
            "enable_natpmp": False,
            # peers of one rack: every one is worth a connection and an upload slot
            "allow_multiple_connections_per_ip": True,
            "unchoke_slots_limit": -1,
            "rate_limit_ip_overhead": False,
        }
    )
    parameters = lt.add_torrent_params()
    parameters.ti = lt.torrent_info(str(file))
    parameters.save_path = str(folder)
    if role == "super":
        parameters.flags |= lt.torrent_flags.super_seeding
    handle = session.add_torrent(parameters)
    while role != "peer" and not handle.status().is_seeding:
        time.sleep(0.1)
    if role != "peer":
        print("ready", flush=True)
        sys.stdin.read()
        return
    peers = [(address, int(port)) for address, _, port in (o.rpartition(":") for o in others)]
    asked = 0.0
    while not handle.status().is_seeding:
        # again and again: one that was not up yet refused the connection
        if time.monotonic() - asked > 2:
            asked = time.monotonic()
            for peer in peers:
                handle.connect_peer(peer)
        time.sleep(0.05)
    print("done", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        run(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
