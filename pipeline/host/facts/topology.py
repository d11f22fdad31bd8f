"""The matrices of `nvidia-smi topo`: how far apart cards are, and what peer access is claimed."""

from __future__ import annotations

import re

from pipeline.known import Known, unknown

# nvidia-smi underlines the head of the table, also where it writes to a pipe
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NAME = re.compile(r"^GPU(\d+)$")
_LINK = re.compile(r"^(X|SYS|NODE|PHB|PXB|PIX|NV\d+)$")
_PEER = re.compile(r"^(X|OK|CNS|GNS|TNS|NS|DR|U)$")


def read_matrix(text: str, *, peers: bool = False) -> Known[dict[str, str]]:
    """Card pairs `0-1` to the entry between them; links must agree in both directions."""
    rows = _rows(text)
    if not rows:
        return unknown("nvidia-smi topo: no row of a GPU")
    if _columns(text) != len(rows):
        return unknown(f"nvidia-smi topo: {_columns(text)} columns, but {len(rows)} rows of GPUs")
    allowed = _PEER if peers else _LINK
    matrix: dict[str, str] = {}
    for a, row in rows.items():
        cells = row[: len(rows)]
        if len(cells) < len(rows) or not all(allowed.match(c) for c in cells):
            return unknown(f"nvidia-smi topo: the row of GPU{a} cannot be read: {' '.join(row)}")
        for b, cell in zip(rows, cells, strict=True):
            if (cell == "X") != (a == b):
                return unknown(f"nvidia-smi topo: {cell} between GPU{a} and GPU{b}")
            if a != b:
                matrix[f"{a}-{b}"] = cell
    uneven = [k for k in matrix if matrix[k] != matrix["-".join(reversed(k.split("-")))]]
    # peer access may differ by direction, a distance may not
    if uneven and not peers:
        return unknown(f"nvidia-smi topo: {uneven[0]} differs between its two directions")
    return matrix


def read_numa(text: str) -> Known[dict[str, str]]:
    """Each card's NUMA node, from `topo -m`."""
    lines = [_plain(x) for x in text.splitlines()]
    head = next((x.split("\t") for x in lines if "NUMA Affinity" in x), None)
    if head is None:
        return unknown("nvidia-smi topo: no NUMA column")
    rows = _rows(text)
    # after the matrix come the CPUs, then the node; NICs may stand between
    others = sum(1 for x in head if re.match(r"^NIC\d+$", x.strip()))
    place = len(rows) + others + 1
    nodes = {str(a): w[place] for a, w in rows.items() if len(w) > place and w[place] != "N/A"}
    return nodes or unknown("nvidia-smi topo: names no NUMA node")


def _columns(text: str) -> int:
    """How many cards the head of the table names."""
    head = next((x for x in map(_plain, text.splitlines()) if "GPU0" in x.split()), "")
    return sum(1 for name in head.split() if _NAME.match(name))


def _plain(line: str) -> str:
    return _ESCAPES.sub("", line)


def _rows(text: str) -> dict[int, list[str]]:
    rows: dict[int, list[str]] = {}
    for line in text.splitlines():
        cells = _plain(line).split()
        name = _NAME.match(cells[0]) if len(cells) > 1 else None
        # the head of the table also begins with GPU0, but another name follows it
        if name and not _NAME.match(cells[1]) and cells[1] not in ("CPU", "NIC0"):
            rows[int(name[1])] = cells[1:]
    return rows
