from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import sample
from tests.mutants.accepted import Accepted, read_accepted
from tests.mutants.changes import Mutant, changed_source, mutants_of
from tests.unit.support import ROOT


def changes(body: str, head: str = "def f(a, b):") -> list[Mutant]:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return mutants_of("pipeline/toy.py", f"{head}\n{lines}\n")


def afters(body: str) -> set[str]:
    return {m.after for m in changes(body)}


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("return a < b", {"return a <= b", "return a >= b", "return"}),
        ("return a >= b", {"return a > b", "return a < b", "return"}),
        ("return a == b", {"return a != b", "return"}),
        ("return a is None", {"return a is not None", "return"}),
        ("return a not in b", {"return a in b", "return"}),
        ("return a and b", {"return a or b", "return a", "return b", "return"}),
        ("return a + b", {"return a - b", "return"}),
        ("return a[1:]", {"return a[0:]", "return a[2:]", "return a[:]", "return"}),
        ("return min(a, b)", {"return max(a, b)", "return min(b, a)", "return"}),
        ("return True", {"return False"}),
        ("x = 7", {"x = 6", "x = 8"}),
        ("x = not a", {"x = a"}),
        ("if a:\n    pass", {"if not a:"}),
        ("x = [c for c in a if c]", {"x = [c for c in a if not c]"}),
        ("a.put(b, now=True)", {"a.put(b)", "a.put(b, now=False)", "pass"}),
        ("a.x = b", {"pass"}),
        ("a += b", {"pass"}),
        ("raise ValueError(a, b == 1)", {"pass"}),
        ("for x in a:\n    continue", {"break"}),
        ("try:\n    pass\nexcept OSError:\n    a = b", {"except OSError: raise"}),
        (
            "match a:\n    case [x] if x > b:\n        pass",
            {"case [x] if x >= b:", "case [x] if x <= b:"},
        ),
    ],
)
def test_each_change_is_made_once(body: str, want: set[str]) -> None:
    assert afters(body) == want


@pytest.mark.parametrize(
    "body",
    [
        '"""What it is for."""',
        "assert a == b",
        "log.say(a, b)",
        "x = a / 'name'",
        "x = 'text' + a",
        "x = isinstance(a, str)",
        "for x in zip(a, *b, strict=True):\n    pass",
        "x = a.decode(encoding='utf-8')",
        "x: dict[str, 1] = a",
    ],
)
def test_what_proves_nothing_is_left_alone(body: str) -> None:
    assert changes(body) == []


def test_a_mutant_differs_from_the_module_in_one_place_only() -> None:
    source = "LIMIT = 5\n\ndef f(a):\n    if a > LIMIT:\n        return 1\n    return 2\n"
    original = ast.unparse(ast.parse(source)).splitlines()
    mutants = mutants_of("pipeline/toy.py", source)
    assert len(mutants) == 6
    for mutant in mutants:
        lines = changed_source(source, mutant).splitlines()
        assert [b for a, b in zip(original, lines, strict=True) if a != b] != []
        assert sum(a != b for a, b in zip(original, lines, strict=True)) == 1


def test_functions_have_the_names_that_python_gives_them() -> None:
    source = (
        "class A:\n"
        "    def m(self):\n"
        "        def inner():\n"
        "            return 1 + self\n"
        "        return inner() - 2\n"
    )
    functions = {m.before: m.function for m in mutants_of("toy.py", source)}
    assert functions == {
        "return 1 + self": "A.m.<locals>.inner",
        "return inner() - 2": "A.m",
    }


def test_a_mutant_keeps_its_name_when_lines_move() -> None:
    (first,) = changes("a.x = b")
    moved = mutants_of("pipeline/toy.py", "# more\n\n\ndef f(a, b):\n    a.x = b\n")[0]
    assert (first.name, first.line) == (moved.name, 2)
    assert moved.line == 5


def test_mutants_of_the_pipeline_are_python() -> None:
    path = Path("pipeline/core/log.py")
    source = (ROOT / path).read_text(encoding="utf-8")
    mutants = mutants_of(str(path), source)
    assert len(mutants) > 50
    # each is a whole module again, a tenth of a second
    for mutant in mutants[::6]:
        compile(changed_source(source, mutant), mutant.file, "exec")


def test_a_mutant_has_one_name_whatever_python_quotes_its_text_with() -> None:
    entry = read_accepted()[0].model_copy(update={"before": """f"{', '.join(a)}\""""})
    later = entry.model_copy(update={"before": """f'{', '.join(a)}'"""})  # 3.12 and newer
    assert entry.name == later.name
    assert entry.name != entry.model_copy(update={"before": "f'{a}'"}).name


@pytest.mark.parametrize("entry", read_accepted(), ids=lambda entry: entry.function)
def test_an_accepted_mutant_is_one_of_the_code_as_it_is(entry: Accepted) -> None:
    source = (ROOT / entry.file).read_text(encoding="utf-8")
    assert entry.name in {mutant.name for mutant in mutants_of(entry.file, source)}


@pytest.mark.parametrize("package", sample.BY_COMMAND)
def test_tests_that_run_a_package_by_its_commands_are_chosen_and_there(package: str) -> None:
    chosen = sample.tests_of(ROOT, package)
    assert chosen[0] == f"tests/unit/{package.rpartition('/')[2]}"
    assert set(sample.BY_COMMAND[package]) < set(chosen)
    assert all((ROOT / name).exists() for name in chosen)
