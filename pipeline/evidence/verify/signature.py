"""Who signed an envelope, whether that key is trusted, and whether the evidence is complete.

Completeness is judged by the signed sets of evidence. Of each key the latest set counts. A set must
list every statement, and every statement that it lists must be there. A statement that only an
older set lists was replaced and is passed over: but a gate's result only where the latest set has
one of the same gate and card, so that leaving a failure out of a later set does not hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from pipeline.artifacts.attest.envelope import Envelope
from pipeline.artifacts.attest.keys import is_valid_signature
from pipeline.artifacts.attest.names import REBUILD, TEST_RESULT, UNGATED, predicate_kind
from pipeline.artifacts.attest.predicates import EvidenceSet
from pipeline.artifacts.attest.statement import Statement
from pipeline.artifacts.attest.trust import Trust, TrustedKey, judges_strangers
from pipeline.core import log
from pipeline.core.errors import RecordInvalid
from pipeline.core.model import sha256_of
from pipeline.evidence.statements.evidence_set import holds_set, latest, read_set, verdict_of
from pipeline.evidence.statements.results import TestResult, read_test_result
from pipeline.evidence.verify.verdict import Code, Node, Verdict, broken, incomplete, worst_verdict

if TYPE_CHECKING:
    from pipeline.evidence.statements.provenance import Provenance

_TITLE = "signature"
_SET = "all its evidence"


def judge_signatures(
    envelope: Envelope, trust: Trust | None, now: datetime
) -> tuple[Node, list[TrustedKey]]:
    """One trusted signature is enough; one that does not match its own key breaks everything."""
    if not envelope.signatures:
        return Node(_TITLE, Verdict.UNSIGNED, "nobody signed it"), []
    # cosign's signatures name no key
    named = ", ".join(s.key_id for s in envelope.signatures if s.key_id) or "a key without a name"
    if trust is None:
        # not broken: the signature may be good, and no key can tell
        message = f"signed by {named}, and no key is trusted here"
        return Node(_TITLE, Verdict.INCOMPLETE, message, code=Code.UNJUDGED_SIGNER), []
    believed: list[TrustedKey] = []
    doubts: list[str] = []
    is_known, statement, signed = False, envelope.statement, envelope.signed_bytes
    for signature in envelope.signatures:
        candidates = trust.find(signature.key_id)
        # without a key id, every trusted key is tried
        made = (k for k in candidates if is_valid_signature(k.key, signature.sig, signed))
        if (key := next(made, None)) is not None:
            is_known = True
            if why := key.objection(statement.predicate_type, statement.recorded, now):
                doubts.append(why)
            # one key may have signed twice; it counts once
            elif key not in believed:
                believed.append(key)
        elif signature.key_id is None:
            doubts.append("no key of the trust file made its signature")
        elif candidates:
            # a wrong signature under a trusted key id is damage or an attack: nothing else counts
            message = f"the signature of {candidates[0].name} is not over these bytes"
            return broken(_TITLE, message), []
        else:
            doubts.append(f"signed by {signature.key_id}, a key that the trust file does not know")
    if not believed and not is_known and not judges_strangers(trust):
        message = f"signed by {named}, and only your own keys are trusted here"
        return Node(_TITLE, Verdict.INCOMPLETE, message, code=Code.UNJUDGED_SIGNER), []
    if not believed:
        code = None if is_known else Code.STRANGER
        if is_known and not statement.has_happened(now):
            code = Code.AHEAD
        return Node(_TITLE, Verdict.BROKEN, "; ".join(doubts), code=code), []
    message = f"by {', '.join(key.name for key in believed)}; stated "
    # of the statement: a signature has no time, and `new-key` also signs older statements
    at = statement.recorded
    message += f"{at:%Y-%m-%d %H:%M:%S} UTC by its own clock" if at else "without a time"
    message += f" (not counted: {'; '.join(doubts)})" if doubts else ""
    return Node(_TITLE, message=message), believed


@dataclass(frozen=True)
class Opened:
    """An envelope whose signatures, and mostly whose subject, were judged."""

    name: str
    envelope: Envelope
    checks: tuple[Node, ...]
    keys: tuple[TrustedKey, ...]  # that are trusted and signed it

    @property
    def statement(self) -> Statement:
        return self.envelope.statement

    @property
    def is_about_this(self) -> bool:
        return worst_verdict(c.verdict for c in self.checks) is not Verdict.BROKEN

    @property
    def is_believed(self) -> bool:
        return bool(self.keys) and self.is_about_this

    @property
    def payload(self) -> str:
        """The digest by which a set names it."""
        return sha256_of(self.envelope.payload)

    @property
    def kind(self) -> str:
        return predicate_kind(self.statement.predicate_type)

    @property
    def test(self) -> TestResult | None:
        """The gate's result, where this is one and can be read."""
        if self.statement.predicate_type == TEST_RESULT:
            with suppress(RecordInvalid):
                return read_test_result(self.statement.predicate)
        return None


class SetJudge:
    """The statements about one image, and the sets among those that count."""

    def __init__(self, opened: Sequence[Opened], counted: Sequence[Opened]) -> None:
        self._opened = [x for x in opened if x.is_about_this]
        self._counted = counted
        self._sets: list[Opened] = []
        self._lists: dict[str, EvidenceSet] = {}
        for each in (x for x in counted if holds_set(x.envelope)):
            with suppress(RecordInvalid):  # reported where that statement is judged
                self._lists[each.payload] = read_set(each.statement)
                self._sets.append(each)
        self._known = {c.payload for listed in self._lists.values() for c in listed.statements}
        # unsigned sets are all compared together, under the key ""
        keys = {key.id for x in self._sets for key in x.keys} or {""}
        self._current: list[Opened] = []
        for key_id in sorted(keys):
            made = [x for x in self._sets if not key_id or key_id in {k.id for k in x.keys}]
            newest = latest([x.envelope for x in made])
            self._current += [x for x in made if x.envelope in newest and x not in self._current]
        listed = (c for x in self._current for c in self._lists[x.payload].statements)
        self._named = {c.payload: c for c in listed}

    @property
    def believed(self) -> frozenset[str]:
        """The digests of all sets that trusted keys signed."""
        return frozenset(x.payload for x in self._sets if x.is_believed)

    def passed_over(self, opened: Opened) -> str:
        """Why a statement does not count, or no longer; empty where it does."""
        if opened.payload in self._named or opened in self._current:
            return ""
        kind = opened.statement.predicate_type
        # that gates did not pass is never passed over: a later set without it would hide it
        is_final = kind == UNGATED
        # a statement of another gate or card does not replace a result
        about = verdict_of(opened.statement)[0]
        like = {
            c.payload for c in self._named.values() if (c.predicate_type, c.about) == (kind, about)
        }
        if any(check.code is Code.AHEAD for check in opened.checks):
            # its signer's clock was wrong, and that signer has stated the same again since
            again = holds_set(opened.envelope) or like & {x.payload for x in self._opened}
            claimed = {signature.key_id for signature in opened.envelope.signatures}
            signed_again = any(key.id in claimed for x in self._current for key in x.keys)
            may_go = again and signed_again and not is_final
            return "is dated in the future and does not count" if may_go else ""
        # untrusted beside trusted: judged as it is, and no set of ours lists it
        if opened not in self._counted:
            return ""
        if holds_set(opened.envelope):
            return "an older set; the latest one counts" if opened in self._sets else ""
        is_replaced = opened.payload in self._known and like and not is_final
        return "replaced by a statement of the latest set" if is_replaced else ""

    def judge(self, made: Provenance | None) -> list[Node]:
        """Finds missing and added statements, and whether a set records ungated publishing."""
        if not self._counted:
            return []
        if not self._current:
            return [incomplete(_SET, "no signed set lists its statements: some may be missing")]
        nodes = []
        present = {x.payload: x for x in self._opened}
        built = made.definition.external if made else None
        for opened in self._current:
            listed, wrong = self._lists[opened.payload], []
            if built and (built.image, built.platform) != (listed.image, listed.platform):
                nodes.append(broken(_SET, f"its set is of {listed.image} for {listed.platform}"))
                continue
            for named in listed.statements:
                found = present.get(named.payload)
                if found is None:
                    message = "is listed in the set, but missing: it was removed or replaced"
                    wrong.append(broken(named.title, message))
                # the set repeats the verdict so that people see it; it must not lie about it
                elif (named.about, named.verdict) != verdict_of(found.statement):
                    message = f"contradicts the set, which lists {named.title}"
                    wrong.append(broken(found.name, message))
            if listed.ungated is not None:
                message = f"published although its gates did not pass: {listed.ungated}"
                wrong.append(incomplete("ungated", message))
            who = ", ".join(key.name for key in opened.keys)
            message = f"{log.count(len(listed.statements), 'statement')}, as in the set"
            message += f" that {who} signed" if who else ""
            nodes.append(Node(_SET, message="" if wrong else message, children=tuple(wrong)))
        signers = {key.id for x in self._sets for key in x.keys}
        # statements that no set lists
        for each in self._opened:
            if holds_set(each.envelope) or each.payload in self._known:
                continue
            if not each.keys or signers & {key.id for key in each.keys}:
                nodes.append(broken(each.name, "was added later: no set lists it"))
            # a rebuild by another key is welcome, and the publisher's sets cannot list it
            elif each.statement.predicate_type != REBUILD:
                message = "no set by its signer lists it: more of that signer's may be missing"
                nodes.append(incomplete(each.name, message))
        return nodes
