"""How many cases the gates have: counted from their files, so that the page cannot be old."""

from __future__ import annotations

from pipeline.images.gate.numerics import read_numeric_cases
from pipeline.images.gate.parsers.cases import read_parser_gates
from pipeline.images.gate.smem.cases import read_gates
from pipeline.images.spec.checkout import Checkout
from tests.docs.pages import ROOT

BEGIN, END = "<!-- cases: begin -->", "<!-- cases: end -->"
_HEAD = """| image | cases of shared memory | of numerics | of parsers | accepted kernels |
|---|---|---|---|---|
"""


def with_cases(page: str) -> str:
    """The page with the table of all images that have gates between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError("the page has no place for the table of cases")
    checkout = Checkout(ROOT)
    names = sorted(p.parents[1].name for p in ROOT.glob("images/*/gates/engine.yaml"))
    rows = "".join(_row(checkout, name) for name in names)
    return f"{before}{BEGIN}\n{_HEAD}{rows}{END}{after}"


def _row(checkout: Checkout, image: str) -> str:
    gates = read_gates(checkout, image)
    accepted = sum(len(gate.accepted) for gate in gates.gates.values())
    numeric = read_numeric_cases(checkout, image, gates)
    answers = read_parser_gates(checkout, image).cases
    counts = (len(gates.cases()), len(numeric), len(answers), accepted)
    return f"| `{image}` | {' | '.join(map(str, counts))} |\n"
