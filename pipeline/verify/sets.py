"""Whether the evidence of an image is complete: compared with the sets that were signed.

Of each key the latest set counts. What it names must be there, and what is there must be named by
a set. A statement that only an older set names was replaced, and is passed over: but a gate's
result only where the latest set has one of the same gate and card, so that leaving a failure out
of a later set does not hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from pipeline import log
from pipeline.attest.names import REBUILD, UNGATED
from pipeline.attest.predicates import Committed
from pipeline.errors import RecordInvalid
from pipeline.evidence.evidence_set import is_set, latest, read_set, verdict_of
from pipeline.evidence.provenance import Provenance
from pipeline.verify.signature import Opened
from pipeline.verify.verdict import Node, Verdict

TITLE = "all its evidence"


class SetJudge:
    """The statements about one image, and the sets among those that count."""

    def __init__(self, opened: Sequence[Opened], counted: Sequence[Opened]) -> None:
        self._opened = [x for x in opened if x.is_about_this]
        self._counted = counted

    @cached_property
    def _sets(self) -> list[Opened]:
        return [x for x in self._counted if is_set(x.envelope) and _can_be_read(x)]

    @cached_property
    def _current(self) -> list[Opened]:
        """The latest set of each key; of those that nobody signed, the latest."""
        # of unsigned sets all are compared together, under the key ""
        keys = {key.id for x in self._sets for key in x.keys} or {""}
        current: list[Opened] = []
        for key in sorted(keys):
            made = [x for x in self._sets if not key or key in {k.id for k in x.keys}]
            newest = latest([x.envelope for x in made])
            current += [x for x in made if x.envelope in newest and x not in current]
        return current

    @cached_property
    def _named(self) -> dict[str, Committed]:
        return {c.payload: c for x in self._current for c in _statements(x)}

    @property
    def believed(self) -> frozenset[str]:
        """The digests of all sets that trusted keys signed."""
        return frozenset(x.payload for x in self._sets if x.is_believed)

    def passed_over(self, opened: Opened) -> str:
        """Why a statement does not count, or no longer; empty where it does."""
        if opened.payload in self._named or opened in self._current:
            return ""
        kind = opened.envelope.statement.predicate_type
        # a statement of another gate or card does not replace a result
        about = verdict_of(opened.envelope.statement)[0]
        like = [c for c in self._named.values() if (c.predicate_type, c.about) == (kind, about)]
        replaced = bool(like)
        # that gates did not pass is never passed over: a later set without it would hide it
        is_final = kind == UNGATED
        if opened.is_ahead:
            # its signer's clock was wrong, and that signer has stated the same again since
            again = is_set(opened.envelope) or {c.payload for c in like} & {
                x.payload for x in self._opened
            }
            may_go = again and self._states_again(opened) and not is_final
            return "is dated in the future and does not count" if may_go else ""
        # untrusted beside trusted: judged as it is, and no set of ours speaks of it
        if opened not in self._counted:
            return ""
        if is_set(opened.envelope):
            return "an older set; the latest one counts" if opened in self._sets else ""
        older = {c.payload for x in self._sets for c in _statements(x)}
        if opened.payload not in older or is_final or not replaced:
            return ""
        return "replaced by a statement of the latest set"

    def _states_again(self, opened: Opened) -> bool:
        """Whether a key that signed it also signed a set that counts."""
        claimed = {signature.key_id for signature in opened.envelope.signatures}
        return any(key.id in claimed for x in self._current for key in x.keys)

    def judge(self, made: Provenance | None) -> list[Node]:
        """What is missing, what was added, and whether a set records ungated publishing."""
        if not self._counted:
            return []
        if not self._current:
            message = "no signed set lists its statements: some may be missing"
            return [Node(TITLE, Verdict.INCOMPLETE, message)]
        nodes = [self._present(x, made) for x in self._current]
        return [*nodes, *self._added()]

    def _present(self, opened: Opened, made: Provenance | None) -> Node:
        listed = read_set(opened.envelope.statement)
        built = made.definition.external if made else None
        if built and (built.image, built.platform) != (listed.image, listed.platform):
            message = f"its set is of {listed.image} for {listed.platform}"
            return Node(TITLE, Verdict.BROKEN, message)
        here = {x.payload: x for x in self._opened}
        nodes = []
        for named in listed.statements:
            there = here.get(named.payload)
            if there is None:
                message = "is listed in the set, but missing: it was removed or replaced"
                nodes.append(Node(named.title, Verdict.BROKEN, message))
            # the set repeats the verdict so that people see it; it must not lie about it
            elif (named.about, named.verdict) != verdict_of(there.envelope.statement):
                message = f"contradicts the set, which lists {named.title}"
                nodes.append(Node(there.item.name, Verdict.BROKEN, message))
        if listed.ungated is not None:
            message = f"published although its gates did not pass: {listed.ungated}"
            nodes.append(Node("ungated", Verdict.INCOMPLETE, message))
        who = ", ".join(key.name for key in opened.keys)
        message = f"{log.count(len(listed.statements), 'statement')}, as in the set"
        message += f" that {who} signed" if who else ""
        return Node(TITLE, message="" if nodes else message, children=tuple(nodes))

    def _added(self) -> list[Node]:
        """Statements that no set lists."""
        known = {c.payload for x in self._sets for c in _statements(x)}
        signers = {key.id for x in self._sets for key in x.keys}
        nodes = []
        for each in self._opened:
            if is_set(each.envelope) or each.payload in known:
                continue
            # a publisher cannot list what others sign later
            is_stranger = not signers & {key.id for key in each.keys}
            if is_stranger and each.keys:
                # a rebuild by another key is welcome, and the publisher's sets cannot list it
                if each.envelope.statement.predicate_type == REBUILD:
                    continue
                message = "no set by its signer lists it: more of that signer's may be missing"
                nodes.append(Node(each.item.name, Verdict.INCOMPLETE, message))
            else:
                message = "was added later: no set lists it"
                nodes.append(Node(each.item.name, Verdict.BROKEN, message))
        return nodes


def _statements(opened: Opened) -> list[Committed]:
    return read_set(opened.envelope.statement).statements


def _can_be_read(opened: Opened) -> bool:
    try:
        read_set(opened.envelope.statement)
    except RecordInvalid:
        return False
    return True
