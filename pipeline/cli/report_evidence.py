"""How far what stands behind a run was checked, as a report shows it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from pipeline.bench.place import RUN_FILE, run_folder
from pipeline.report.model import EvidenceLink, RunData
from pipeline.verify.chain import Judge
from pipeline.verify.evidence import beside, gather
from pipeline.verify.runs import Behind, judge_run
from pipeline.verify.verdict import Node


def with_states(run: RunData, path: Path, judge: Judge, behind: Behind) -> RunData:
    """A run with the verdicts of `sm120 verify` on all that it names."""
    folder = run_folder(path)
    within = Behind(behind.store, (*behind.folders, folder, folder.parent))
    walked = judge_run(folder, gather(beside(folder / RUN_FILE)), judge, within)
    return run.model_copy(update={"evidence": evidence_links(run.evidence, walked.node.children)})


def evidence_links(named: Iterable[EvidenceLink], nodes: Iterable[Node]) -> list[EvidenceLink]:
    """Each check of a run, with the digest that the run names for it."""
    by_name = {link.name: link for link in named}
    judged = [_link(node, by_name) for node in nodes]
    # what no check is about by itself, such as the raw requests
    names = {link.name for link in judged}
    return [*judged, *(link for link in by_name.values() if link.name not in names)]


def _link(node: Node, named: Mapping[str, EvidenceLink]) -> EvidenceLink:
    name = node.part if node.part in named else node.title
    digest = named[name].digest if name in named else None
    # of a tree only what decides is said; `sm120 verify` shows the rest
    decisive = node.culprit()
    where = "" if decisive is node else f"{decisive.title}: "
    message = decisive.message.replace(digest or "\0", "").strip(" ,")
    body = {"name": name, "digest": digest, "state": node.verdict.value}
    return EvidenceLink.model_validate({**body, "message": f"{where}{message}"})
