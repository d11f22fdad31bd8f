"""Whether a port can be used: asked on this machine, or sent to another one. Standard library."""

from __future__ import annotations

import socket
import sys


def port_problem(port: int) -> str:
    """Why no server can listen there; empty where the port is free."""
    try:
        with socket.socket() as probe:
            # as Docker binds it: a connection that is just closing does not hold the port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except PermissionError:
        # a low port is not for this user, but Docker runs as root: only whether it is taken counts
        with socket.socket() as caller:
            return "" if caller.connect_ex(("127.0.0.1", port)) else "Address already in use"
    except OSError as error:
        return error.strerror or str(error)
    return ""


if __name__ == "__main__":
    print(port_problem(int(sys.argv[1])))
