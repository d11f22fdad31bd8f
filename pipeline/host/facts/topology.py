"""The matrices of `nvidia-smi topo`: how far apart cards are, and what is claimed of them."""

from __future__ import annotations

import re

from pipeline.known import Known, unknown

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NAME = re.compile(r"^GPU(\d+)$")
_LINK = re.compile(r"^(X|SYS|NODE|PHB|PXB|PIX|NV\d+)$")
_PEER = re.compile(r"^(X|OK|CNS|GNS|TNS|NS|DR|U)$")


def read_matrix(text: str, *, peers: bool = False) -> Known[dict[str, str]]:
    """Card pairs `0-1` to the word between them; both directions must agree with each other."""
    rows = _rows(text)
    if not rows:
        return unknown("nvidia-smi topo: no row of a GPU")
    if _columns(text) != len(rows):
        return unknown(f"nvidia-smi topo: {_columns(text)} columns, but {len(rows)} rows of GPUs")
    allowed = _PEER if peers else _LINK
    found: dict[str, str] = {}
    for a, words in rows.items():
        cells = words[: len(rows)]
        if len(cells) < len(rows) or not all(allowed.match(c) for c in cells):
            return unknown(f"nvidia-smi topo: the row of GPU{a} cannot be read: {' '.join(words)}")
        for b, cell in zip(rows, cells, strict=True):
            if (cell == "X") != (a == b):
                return unknown(f"nvidia-smi topo: {cell} between GPU{a} and GPU{b}")
            if a != b:
                found[f"{a}-{b}"] = cell
    crooked = [k for k in found if found[k] != found["-".join(reversed(k.split("-")))]]
    if crooked and not peers:
        return unknown(f"nvidia-smi topo: {crooked[0]} is not the same both ways")
    return found


def read_numa(text: str) -> Known[dict[str, str]]:
    """Each card's NUMA node, as `topo -m` says it."""
    lines = [_plain(x) for x in text.splitlines()]
    head = next((x.split("\t") for x in lines if "NUMA Affinity" in x), None)
    if head is None:
        return unknown("nvidia-smi topo: has no NUMA column")
    rows = _rows(text)
    # after the matrix come the CPUs, then the node; NICs may stand between
    others = sum(1 for x in head if re.match(r"^NIC\d+$", x.strip()))
    place = len(rows) + others + 1
    found = {str(a): w[place] for a, w in rows.items() if len(w) > place and w[place] != "N/A"}
    return found if found else unknown("nvidia-smi topo: says no NUMA node")


def _columns(text: str) -> int:
    """How many cards the head of the table names."""
    head = next((x for x in map(_plain, text.splitlines()) if "GPU0" in x.split()), "")
    return sum(1 for word in head.split() if _NAME.match(word))


def _plain(line: str) -> str:
    return _ESCAPES.sub("", line)


def _rows(text: str) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for line in text.splitlines():
        words = _plain(line).split()
        name = _NAME.match(words[0]) if len(words) > 1 else None
        # the head of the table also begins with GPU0; its next word is no cell
        if name and not _NAME.match(words[1]) and words[1] not in ("CPU", "NIC0"):
            found[int(name[1])] = words[1:]
    return found
