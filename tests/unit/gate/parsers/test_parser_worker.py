"""The worker as a process of its own, with a little engine in the place of an image's."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from pipeline.artifacts.store.store import open_store
from pipeline.images.gate.parsers.cases import ParserCase, ParserGates, ParsersFile, whole_format
from pipeline.images.gate.parsers.judge import ParserResult, ParserTarget
from pipeline.images.gate.parsers.worker.judging import reduce_stream
from pipeline.images.gate.parsers.worker.streams import Stream, every_stream
from pipeline.images.gate.parsers.worker.tokens import ByteTokenizer, HarmonyTokenizer
from pipeline.images.gate.smem.engine import EngineTree
from pipeline.images.gate.smem.run import kept_or_asked
from tests.unit.gate.parsers.little_engine import write_engine
from tests.unit.gate.parsers.test_planted_parsers import CASES, FORMATS, GATES, TOOLS
from tests.unit.gate.smem.test_run import FACTS, ThisPython

NAMES = ("call-no-think", "two-calls", "think/cut-off")
FILE = GATES.file.model_copy(update={"bare": ["sglang"], "left_out": [], "no_endpoint": {}})


@pytest.fixture
def target(tmp_path: Path) -> ParserTarget:
    formats = {name: whole_format(name, FORMATS).model_dump(mode="json") for name in CASES}
    write_engine(tmp_path / "engine", formats, TOOLS)
    tree = EngineTree(tmp_path / "engine", "sglang", "1", f"sha256:{'0' * 64}")
    environment = ThisPython(tmp_path / "environment", FACTS, ("torch",))
    store = open_store(tmp_path / "store")
    return ParserTarget(store, environment, tree, FILE.bare, FILE.left_out)


def asked(parser: str, *truths: str) -> list[ParserCase]:
    parsers = {"parsers": {"tool_call_parser": parser}}
    return [CASES["kimi-k2"][truth].model_copy(update=parsers) for truth in truths]


def judged(
    target: ParserTarget, cases: list[ParserCase], file: ParsersFile = FILE
) -> dict[str, ParserResult]:
    return {
        case.name.partition("/")[2]: ParserResult.of(case, answer, file, cached=kept)
        for case, answer, kept in kept_or_asked(target, cases)
    }


def test_a_sound_engine_passes_and_is_asked_once(target: ParserTarget) -> None:
    cases = asked("kimi-k2", *NAMES)
    results = judged(target, cases)
    assert {result.verdict for result in results.values()} == {"passed"}
    first = results["call-no-think"]
    assert first.streams > 100
    assert first.route.startswith("sglang/srt/entrypoints/openai/serving_chat.py")
    assert first.stand_ins == ["sglang", "torch"]
    assert all(result.cached for result in judged(target, cases).values())


def test_an_engine_that_needs_small_steps_fails_with_the_smallest_that_breaks_it(
    target: ParserTarget,
) -> None:
    (result,) = judged(target, asked("kimi-k2 second_arguments_twice", "two-calls")).values()
    assert (result.verdict, result.severity) == ("failed", "larger steps")
    assert result.smallest is not None
    # from the end of the first call to that of the second, and nothing else
    step = result.smallest.step
    assert step.startswith("<|tool_call_end|><|tool_call_begin|>")
    assert step.endswith("<|tool_call_end|>")
    assert result.smallest.got["arguments"][0] == result.smallest.got["arguments"][1]


def test_an_engine_that_always_fails_breaks_token_by_token(target: ParserTarget) -> None:
    (result,) = judged(target, asked("kimi-k2 name_twice", "call-no-think")).values()
    assert (result.verdict, result.severity) == ("failed", "token by token")
    assert "second name" in result.faults
    assert result.unstreamed is not None


def test_a_parser_that_raises_breaks_the_stream(target: ParserTarget) -> None:
    (result,) = judged(target, asked("kimi-k2 raises_at_a_brace", "braces")).values()
    assert result.verdict == "failed"
    assert result.faults == ["raises ValueError"]


def test_a_parser_that_the_engine_does_not_have_is_unknown(target: ParserTarget) -> None:
    (result,) = judged(target, asked("kimi-k9", "plain")).values()
    assert (result.verdict, result.streams) == ("unknown", 0)
    assert "kimi-k9" in result.message


def test_an_endpoint_that_is_gone_is_unknown_and_is_asked_again(target: ParserTarget) -> None:
    path = target.tree.folder / "sglang/srt/entrypoints/openai/serving_chat.py"
    path.write_text("import nowhere\n")
    cases = asked("kimi-k2", "plain")
    (result,) = judged(target, cases).values()
    assert (result.verdict, result.message) == (
        "unknown",
        "ModuleNotFoundError: No module named 'nowhere'",
    )
    assert not any(result.cached for result in judged(target, cases).values())


# Another way to ask → what can be wrong there, and a truth that shows it.
PLANTED = {
    "required": {
        "": "two-calls",
        "arguments come late": "call",
        "forgets empty arguments": "empty-arguments",
        "no grammar": "two-calls",  # sound: the model writes its own format then
    },
    "named": {"": "escapes", "arguments come late": "hyphen-name"},
    "thinking-off": {"": "content-call", "takes an answer for a thought": "call"},
    "messages": {
        "": "three-kinds",
        "block of space within a call": "two-calls",
        "delta of another kind": "call",
        "never closes": "content-call",
        "ends its turn": "call",
        "no end": "plain",
        "name without hyphens": "three-kinds",
    },
    "responses": {
        "": "three-kinds",
        "no name": "call",
        "loses a delta": "call",
        "half an item": "call",
        "forgets its calls": "content-call",
        "other ids": "call",
        "fails": "plain",
        "counts by two": "plain",
        "loses other letters": "unicode",
    },
}
SOUND = ("", "no grammar")


def test_each_way_to_ask_passes_sound_engines_and_catches_planted_defects(
    target: ParserTarget,
) -> None:
    cases = []
    for mode, defects in PLANTED.items():
        for defect, truth in defects.items():
            whole = CASES["kimi-k2.5"][f"{truth}/{mode}"]
            parsers = {"tool_call_parser": f"kimi-k2.5 {defect.replace(' ', '_')}".strip()}
            named = f"{mode}/{defect}/{truth}"
            cases.append(whole.model_copy(update={"parsers": parsers, "name": named}))
    verdicts = {
        case.name: ParserResult.of(case, answer, FILE, cached=False).verdict
        for case, answer, _ in kept_or_asked(target, cases)
    }
    meant = {
        f"{mode}/{defect}/{truth}": "passed" if defect in SOUND else "failed"
        for mode, defects in PLANTED.items()
        for defect, truth in defects.items()
    }
    assert verdicts == meant


def test_an_answer_that_no_grammar_lets_through_says_nothing_about_the_parser(
    target: ParserTarget,
) -> None:
    parsers = {"parsers": {"tool_call_parser": "kimi-k2.5 refuses"}}
    case = CASES["kimi-k2.5"]["call/required"].model_copy(update=parsers)
    (result,) = judged(target, [case]).values()
    assert (result.verdict, result.streams) == ("unknown", 0)
    assert "grammar does not let this answer through" in result.message


def test_a_parser_that_the_engine_chooses_is_the_one_of_the_template(target: ParserTarget) -> None:
    case = CASES["kimi-k2.5"]["call"]
    chosen = case.model_copy(update={"parsers": {"tool_call_parser": "auto"}})
    other = chosen.model_copy(update={"template": "<call>", "name": "kimi-k2.5/other"})
    found = judged(target, [chosen, other])
    assert found["call"].verdict == "passed"
    assert found["other"].verdict == "unknown"
    assert "finds no parser" in found["other"].message


def test_an_endpoint_that_an_engine_never_had_is_accepted_only_where_the_file_says_so(
    target: ParserTarget,
) -> None:
    shutil.rmtree(target.tree.folder / "sglang/srt/entrypoints/anthropic")
    cases = [
        CASES["kimi-k2.5"][f"plain/{kind}"].model_copy(
            update={"parsers": {"tool_call_parser": "kimi-k2.5"}}
        )
        for kind in ("messages", "responses")
    ]
    why = dict.fromkeys(("messages", "responses"), "This version has no such endpoint.")
    known = FILE.model_copy(update={"no_endpoint": why})
    found = {name: result.verdict for name, result in judged(target, cases, known).items()}
    # what it has must be judged
    assert found == {"plain/messages": "accepted", "plain/responses": "unknown"}
    assert judged(target, cases)["plain/messages"].verdict == "unknown"


@pytest.mark.parametrize("what", ["engine", "case", "setup", "absent"])
def test_whatever_decides_an_answer_of_a_parser_is_part_of_its_key(
    target: ParserTarget, what: str
) -> None:
    from dataclasses import replace

    (case,) = asked("kimi-k2", "plain")
    before = target.key(case)
    if what == "engine":
        target = replace(target, tree=replace(target.tree, digest=f"sha256:{'1' * 64}"))
    elif what == "setup":
        target = replace(target, left_out=["sglang.a"])
    elif what == "absent":
        target = replace(target, environment=replace(target.environment, absent=("zmq",)))
    else:
        case = case.model_copy(update={"text": "</think>other"})
    assert target.key(case) != before


def test_every_cut_of_an_answer_is_among_its_streams() -> None:
    tokenizer = ByteTokenizer({"<t>": False})
    tokens = tokenizer.tokens("é a<t>bc")
    assert [token.text for token in tokens] == ["", "é", " ", "a", "<t>", "b", "c"]
    streams = list(every_stream(len(tokens), tokenizer.words(tokens), "x"))
    assert {s.sizes for s in streams if s.name.startswith("cut")} == {
        (n, 7 - n) for n in range(1, 7)
    }
    assert all(sum(stream.sizes) == len(tokens) for stream in streams)
    # the same answer gives the same streams in every run
    assert streams == list(every_stream(len(tokens), tokenizer.words(tokens), "x"))
    assert [len(s.steps(tokens)) for s in streams if s.name == "whole"] == [1, 2]


def test_a_stream_is_reduced_to_the_step_that_breaks_it() -> None:
    def breaks(stream: Stream) -> bool:
        """Where one step holds the fourth token and the sixth."""
        at = 0
        for size in stream.sizes:
            if at <= 3 and at + size > 5:
                return True
            at += size
        return False

    reduced = reduce_stream(Stream("whole", (2, 6, 2), False), breaks)
    assert reduced.sizes == (1, 1, 1, 3, 1, 1, 1, 1)


def test_a_tokenizer_file_has_the_same_ids() -> None:
    tokenizer = ByteTokenizer({"<t>": False})
    whole = json.loads(tokenizer.to_str())
    assert {token["content"]: token["id"] for token in whole["added_tokens"]}["<t>"] == 256
    assert sorted(whole["model"]["vocab"].values()) == list(range(256))
    assert tokenizer.decode(tokenizer.encode("ü<t>x")) == "ü<t>x"


class LittleEncoding:
    """Bytes in another order, two words and two markers: as much as a tokenizer asks for."""

    known: ClassVar = {"the": 300, " cat": 301, "<t>": 900, "<e>": 901}
    order = bytes(reversed(range(256)))

    @property
    def _inner(self) -> Any:
        return SimpleNamespace(decode_bytes=lambda ids: [self.order[i] for i in ids])

    def encode(self, text: str, **special: Any) -> list[int]:
        words = re.findall(r"the| cat|<[te]>|.", text, re.DOTALL)
        parts = [[self.known[w]] if w in self.known else w.encode() for w in words]
        return [i if i > 255 else self.order.index(i) for part in parts for i in part]

    def decode(self, ids: list[int]) -> str:
        texts = {i: text.encode() for text, i in self.known.items()}
        return b"".join(texts.get(i) or self.order[i : i + 1] for i in ids).decode()


@pytest.fixture
def little_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(load_harmony_encoding=lambda name: LittleEncoding())
    monkeypatch.setitem(sys.modules, "openai_harmony", package)
    monkeypatch.setattr(HarmonyTokenizer, "_encoding", None)


@pytest.mark.usefixtures("little_vocabulary")
def test_a_vocabulary_of_the_engine_s_own_gives_the_ids() -> None:
    tokenizer = HarmonyTokenizer({"<t>": True}, "<e>")
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<e>", 901)
    text = "<t>é the cat"
    tokens = tokenizer.tokens(text)
    assert "".join(token.text for token in tokens) == text
    assert tokenizer.words(tokens) == [1, 1, 1, 4, 4]
    # single bytes, and the vocabulary's own tokens in a step of several
    assert [tokenizer.ids([token]) for token in tokens[:2]] == [[900], [255 - 0xC3]]
    assert tokenizer.ids(tokens[-8:]) == [255 - ord(" "), 300, 301]
    # a character that the step cuts stays as it is
    assert tokenizer.ids(tokens[2:]) == [token.id for token in tokens[2:]]
    assert tokenizer.decode(tokenizer.ids(tokens)) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.usefixtures("little_vocabulary")
@pytest.mark.parametrize(("marker", "end"), [("<t>", "<r>"), ("<x>", "<e>")])
def test_a_marker_that_is_no_token_of_the_vocabulary_is_refused(marker: str, end: str) -> None:
    with pytest.raises(ValueError, match="too many values"):
        HarmonyTokenizer({marker: True}, end)


def test_a_vocabulary_that_an_image_does_not_have_is_unknown(target: ParserTarget) -> None:
    plain = asked("kimi-k2", "plain")[0]
    case = plain.model_copy(update={"vocabulary": "openai_harmony", "end": "<e>"})
    result = judged(target, [case])["plain"]
    assert (result.verdict, result.streams) == ("unknown", 0)
    assert "openai_harmony" in result.message


def test_the_worker_imports_nothing_of_the_pipeline() -> None:
    folder = Path(sys.modules[ByteTokenizer.__module__].__file__ or "").parent
    for path in folder.glob("*.py"):
        assert "from pipeline" not in path.read_text(encoding="utf-8"), path


def test_gates_of_one_image_are_those_of_its_file() -> None:
    assert isinstance(GATES, ParserGates)
    assert {case.family for case in GATES.cases} == set(GATES.file.families)
