"""Renders every conversation by the image and by the reference, and compares the texts."""

from __future__ import annotations

import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from pydantic import Base64Bytes

from pipeline.core.errors import TemplateUnusable
from pipeline.core.files import os_errors_explained
from pipeline.core.model import Digest, Frozen, canonical_json, sha256_of
from pipeline.core.verdict import GateVerdict, worst
from pipeline.images.assemble.plan import ImagePlan, program_digest
from pipeline.images.gate.files import read_setup
from pipeline.images.gate.parsers.judge import PARSER_WORKER, ChatTarget
from pipeline.images.gate.smem.engine import (
    EngineTree,
    GateContext,
    engine_pin,
    engine_tree,
    mark_used,
)
from pipeline.images.gate.smem.environment import make_environment
from pipeline.images.gate.smem.image_gate import OpenedGate, chosen_series
from pipeline.images.gate.smem.results import CaseReply, EngineResult
from pipeline.images.gate.smem.run import kept_or_asked
from pipeline.images.gate.templates.cases import THINKING, Conversation
from pipeline.images.gate.templates.files import ModelText
from pipeline.images.gate.templates.renderer import TemplateRefused
from pipeline.images.gate.templates.sources import (
    TemplateCase,
    TemplateFamily,
    TemplateGates,
    fetch_package,
    fetch_template,
    read_template_gates,
)

TEMPLATE_WORKER = Path(__file__).with_name("worker")
_SHOWN = 60  # characters of each text, from where they differ
_BEFORE = 24  # and of what stands before that in both


class TemplateAnswer(CaseReply):
    """What a worker reports of one conversation."""

    ended: Literal["rendered", "refused", "broke", "not imported", "died", "timed out"]
    data: Base64Bytes = b""  # of the text, every character as it is
    route: str = ""  # the function of the engine that was called
    stand_ins: list[str] = []
    versions: dict[str, str] = {}
    seconds: float = 0.0

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")


class ReferenceText(Frozen):
    """What the reference makes of a conversation."""

    text: str | None = None
    refusal: str = ""  # why the model's own template does not take it
    tokens: int | None = None  # of the text, where the model's tokenizer is there


class FirstDifference(Frozen):
    """Where two texts begin to differ."""

    at: int  # characters that are the same in both
    before: str  # the last of them
    want: str
    got: str

    @classmethod
    def of(cls, want: str, got: str) -> FirstDifference:
        """The first difference of two texts that are not the same."""
        pairs = enumerate(zip(want, got, strict=False))
        at = next((n for n, (a, b) in pairs if a != b), min(len(want), len(got)))
        return cls(
            at=at,
            before=want[max(0, at - _BEFORE) : at],
            want=want[at : at + _SHOWN],
            got=got[at : at + _SHOWN],
        )

    @property
    def sentence(self) -> str:
        """For people."""
        wanted, got = (repr(text) if text else "the end" for text in (self.want, self.got))
        return f"after {self.before!r}: {got} instead of {wanted}"


class RenderedCase(Frozen):
    """A conversation, judged. Unknown is never passed."""

    name: str
    family: str
    verdict: GateVerdict
    message: str = ""
    want: Digest | None = None  # of the reference's text; none where it refuses the conversation
    got: Digest | None = None
    characters: int = 0
    tokens: int | None = None
    difference: FirstDifference | None = None
    route: str = ""
    address: str = "/v1/chat/completions"
    stand_ins: list[str] = []
    seconds: float = 0.0
    cached: bool = False

    @property
    def failed(self) -> int:
        """Counts failures, as an answer counts its streams: a conversation is one text."""
        return int(self.verdict == "failed")

    @classmethod
    def of(
        cls,
        case: TemplateCase,
        answer: TemplateAnswer,
        expected: ReferenceText,
        cached: bool,
    ) -> RenderedCase:
        """The verdict on one conversation."""
        verdict: GateVerdict = "passed"
        message, difference = "", None
        want, is_rendered = expected.text, answer.ended == "rendered"
        if answer.ended in ("not imported", "died", "timed out"):
            reasons = {"timed out": f"took longer than {case.timeout_s} s and was stopped"}
            verdict, message = "unknown", answer.message or reasons.get(answer.ended, answer.ended)
        elif want is None and is_rendered:
            verdict = "failed"
            message = f"is rendered, although its template refuses it: {expected.refusal}"
        elif want is not None and not is_rendered:
            what = "is refused" if answer.ended == "refused" else "breaks the engine"
            verdict, message = "failed", f"{what}: {answer.message}"
        elif want is not None and answer.text != want:
            difference = FirstDifference.of(want, answer.text)
            verdict, message = "failed", difference.sentence
        return cls(
            name=case.name,
            family=case.family,
            verdict=verdict,
            message=message,
            want=None if want is None else sha256_of(want.encode()),
            got=sha256_of(answer.text.encode()) if is_rendered else None,
            characters=len(want or ""),
            tokens=expected.tokens,
            difference=difference,
            route=answer.route,
            stand_ins=answer.stand_ins,
            seconds=answer.seconds,
            cached=cached,
        )


class TemplateResults(EngineResult):
    """All conversations of an image's families, and what decided them."""

    cases: list[RenderedCase]
    templates: dict[str, dict[str, Digest]]  # family → the files that its template is from
    not_judged: dict[str, str] = {}


class TemplateTarget(ChatTarget[TemplateCase, TemplateAnswer]):
    """An engine, or a model maker's own package, that renders conversations."""

    @property
    def program(self) -> Path:
        return TEMPLATE_WORKER

    @property
    def readable(self) -> list[Path]:
        return [PARSER_WORKER]

    @property
    def answer_type(self) -> type[TemplateAnswer]:
        return TemplateAnswer

    def variables(self, cases: Sequence[TemplateCase], work: Path) -> dict[str, str]:
        # there is no network: who asks for a model's files would only wait
        return {**super().variables(cases, work), "HF_HUB_OFFLINE": "1"}

    def key(self, case: TemplateCase) -> str:
        worker = [program_digest(TEMPLATE_WORKER), program_digest(PARSER_WORKER)]
        asked = case.model_dump(exclude={"timeout_s"})
        return self.key_of(worker=worker, setup=[self.bare, self.left_out], case=asked)


@dataclass(frozen=True)
class TemplateGate:
    """An image made ready for rendering, with the templates that could be had."""

    opened: OpenedGate[TemplateGates]
    texts: Mapping[str, ModelText]  # of families
    encoders: Mapping[str, EngineTree]  # of families without a template: their maker's package
    not_judged: Mapping[str, str]

    def target(self, tree: EngineTree) -> TemplateTarget:
        """A package that renders, in the image's own Python."""
        opened, own = self.opened, self.opened.gates.file.left_out
        parsers = opened.gates.parsers
        left_out = parsers.left_out if own is None else own
        return TemplateTarget(
            opened.context.store, opened.environment, tree, parsers.bare, left_out
        )

    def case(self, name: str, conversation: Conversation) -> TemplateCase:
        """A conversation of a family, as workers are given it."""
        gates = self.opened.gates
        family = gates.file.families.get(name, TemplateFamily())
        known = family.parsers_of or name
        parsers = gates.parsers.families.get(known)
        source = gates.sources.templates.get(family.template or "")
        text = self.texts.get(name)
        template: str | dict[str, str] | None = None
        if text:
            template = text.template.source
            if text.tool_template.source != template:
                template = {"default": template, "tool_use": text.tool_template.source}
        tokens = text.template.tokens if text else source.tokens if source else {}
        is_encoded = name in self.encoders
        return TemplateCase(
            name=f"{name}/{conversation.slug}",
            family=name,
            template=template,
            tokens={key: str(value) for key, value in tokens.items()},
            markers=gates.formats.get(known, []),
            parsers={str(k): v for k, v in parsers.parsers.items()} if parsers else {},
            model_type=parsers.model_type if parsers else "other",
            architecture=family.architecture,
            tokenizer_mode=family.tokenizer_mode,
            encoder=source.encoder if source and is_encoded else None,
            pictures=bool(source and source.pictures),
            has_picture=conversation.has_picture,
            messages=[dict(message) for message in conversation.messages],
            tools=[dict(tool) for tool in conversation.tools],
            # an encoder's default is its server's choice
            options=dict(
                conversation.options or (dict.fromkeys(THINKING, True) if is_encoded else {})
            ),
        )

    def expected(self, cases: Sequence[TemplateCase]) -> list[ReferenceText]:
        """The reference's text of each conversation; makers' packages run in the sandbox, too."""
        encoded: dict[str, TemplateAnswer] = {}
        for tree in dict.fromkeys(self.encoders.values()):
            mine = [case for case in cases if self.encoders.get(case.family) == tree]
            answers = kept_or_asked(self.target(tree), mine) if mine else []
            encoded |= {case.name: answer for case, answer, _ in answers}
        found = []
        for case in cases:
            if answer := encoded.get(case.name):
                if answer.ended not in ("rendered", "refused"):
                    raise TemplateUnusable(f"{case.name}: no reference: {answer.message}")
                text = answer.text if answer.ended == "rendered" else None
                found.append(ReferenceText(text=text, refusal=answer.message))
                continue
            of_model = self.texts[case.family]
            try:
                want = of_model.prompt(case)
                # a picture takes as many tokens as its size asks for
                is_counted = of_model.tokenizer_file and not case.has_picture
                tokens = of_model.count(want) if is_counted else None
                found.append(ReferenceText(text=want, tokens=tokens))
            except TemplateRefused as error:
                found.append(ReferenceText(refusal=str(error)))
        return found

    def judge(
        self, tree: EngineTree, chosen: Mapping[str, list[Conversation]]
    ) -> list[RenderedCase]:
        """Judges every conversation on one tree."""
        cases = [
            self.case(family, each)
            for family, several in chosen.items()
            if family not in self.not_judged
            for each in several
        ]
        # a template does not decide whether a model takes pictures
        cases = [case for case in cases if case.pictures or not case.has_picture]
        results = []
        answers = kept_or_asked(self.target(tree), cases)
        for (case, answer, is_kept), want in zip(answers, self.expected(cases), strict=True):
            result = RenderedCase.of(case, answer, want, is_kept)
            for known in self.opened.gates.file.accepted if result.difference else ():
                if not fnmatchcase(case.name, known.case):
                    continue
                tools, messages = known.as_if.tools(case.tools), known.as_if.messages(case.messages)
                changed = case.model_copy(update={"tools": tools, "messages": messages})
                if self.expected([changed])[0].text == answer.text:
                    message = f"{known.reason} {known.upstream[0]}"
                    update = {"verdict": "accepted", "message": message}
                    result = result.model_copy(update=update)
                    break
            results.append(result)
        return results

    @staticmethod
    def encoder(context: GateContext, pin: Any) -> EngineTree:
        """A maker's own package as a folder that a worker imports from."""
        folder = context.store.root / "gate" / "templates" / pin.sha256[:32]
        with context.store.locked(f"gate-{folder.name}"), os_errors_explained(folder):
            if not folder.is_dir():
                package = fetch_package(context, pin)
                with context.store.scratch() as scratch, zipfile.ZipFile(package) as wheel:
                    # its hash is locked; extractall keeps names below the folder
                    wheel.extractall(scratch / "package")
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    (scratch / "package").rename(folder)
        mark_used(folder)
        return EngineTree(folder, pin.name, pin.version, f"sha256:{pin.sha256}")


def open_template_gate(
    context: GateContext,
    plan: ImagePlan,
    texts: Mapping[str, ModelText],
    only: str | None = None,
    series: str | None = None,
) -> TemplateGate:
    """Reads an image's families, and brings their templates: of weights, else of packages."""
    name = plan.spec.name
    gates = read_template_gates(context.checkout, name)
    found, encoders = dict(texts), dict[str, EngineTree]()
    missing = dict[str, str]() if only else dict(gates.file.not_judged)
    for family in gates.chosen(only, list(texts)):
        if family in found:
            continue
        spec = gates.file.families[family]
        source = gates.sources.templates.get(spec.template or "")
        if source is None:
            fetch = spec.fetch or "`sm120 weights fetch NAME`"
            missing[family] = (
                f"its template is not on this machine; fetch it with {fetch}, then name the folder:"
                f" --weights {family}=DIR"
            )
            continue
        pin = gates.sources.archives[source.archive]
        if source.encoder is None:
            found[family] = fetch_template(context, source, pin)
        elif "x86_64" in pin.file and not context.host.endswith("amd64"):
            missing[family] = f"{pin.file}, which renders it, is not for {context.host}"
        else:
            encoders[family] = TemplateGate.encoder(context, pin)
    wheels = sorted({*gates.parsers.wheels, *gates.file.wheels})
    pin = engine_pin(context, plan, read_setup(context.checkout, name).package, None)
    environment = make_environment(context, plan, wheels, kernels=False)
    tree, chosen = engine_tree(context, plan, pin), chosen_series(context, plan, series)
    opened = OpenedGate(context, plan, gates, environment, tree, chosen, is_own=series is None)
    return TemplateGate(opened, found, encoders, missing)


def run_template_gate(
    gate: TemplateGate, *, unpatched: bool = False, only: str | None = None
) -> TemplateResults:
    """Judges an image's rendering."""
    start, opened = time.monotonic(), gate.opened
    tree = opened.tree if unpatched else opened.patched()
    chosen = opened.gates.chosen(only, list(gate.texts))
    cases = gate.judge(tree, chosen)
    if not cases:
        why = "; ".join(f"{family}: {reason}" for family, reason in gate.not_judged.items())
        raise TemplateUnusable(f"{opened.plan.spec.name}: nothing can be judged: {why}")
    # a user's own model says nothing about the image for others
    is_whole = {*gate.texts} <= {*opened.gates.file.families}
    files = {
        name: dict(gate.texts[name].inputs)
        if name in gate.texts
        else {gate.encoders[name].project: gate.encoders[name].digest}
        for name in chosen
        if name not in gate.not_judged
    }
    worker = [program_digest(TEMPLATE_WORKER), program_digest(PARSER_WORKER)]
    return TemplateResults(
        **opened.about(tree, unpatched=unpatched, only=only, is_whole=is_whole),
        worker=sha256_of(canonical_json(worker)),
        verdict=worst([case.verdict for case in cases], "unknown"),
        cases=cases,
        templates=files,
        not_judged=dict(gate.not_judged),
        sandbox=gate.target(tree).sandbox,
        seconds=round(time.monotonic() - start, 3),
    )
