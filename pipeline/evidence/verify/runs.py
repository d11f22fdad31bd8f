"""A benchmark's run and a report of runs: who signed them, the numbers again, each input by digest.

A run's numbers are computed again from its raw requests. A report is a page with its data inside,
compared with the runs that it was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from glob import escape
from itertools import islice
from pathlib import Path

from pipeline.artifacts.attest.envelope import SUFFIX
from pipeline.artifacts.attest.names import BENCHMARK_RUN, HOST_FACTS, REPORT, predicate_kind
from pipeline.artifacts.attest.predicates import check_predicate
from pipeline.artifacts.attest.statement import Statement
from pipeline.artifacts.attest.strict import plain
from pipeline.artifacts.store.store import Store, read_image_record
from pipeline.core import errors, log
from pipeline.core.files import read_plain, sha256_of_file
from pipeline.core.model import sha256_of
from pipeline.evidence.statements.evidence_set import kept_envelopes
from pipeline.evidence.verify.artifact import open_file, open_image, open_layout, read_layout_index
from pipeline.evidence.verify.chain import VerifyContext, judge_attached
from pipeline.evidence.verify.evidence import (
    EvidenceItem,
    attached_in,
    beside,
    distinct,
    gather_envelopes,
)
from pipeline.evidence.verify.signature import Opened, judge_signatures
from pipeline.evidence.verify.verdict import (
    HOST,
    Code,
    Node,
    Verdict,
    broken,
    changed_node,
    incomplete,
    stale,
)
from pipeline.evidence.verify.walk import JudgedEvidence, walk_evidence
from pipeline.evidence.verify.weights import judge_weights
from pipeline.serving.bench.foreign import read_foreign
from pipeline.serving.bench.model import BenchRun
from pipeline.serving.bench.place import REQUESTS_FILE, RUN_FILE
from pipeline.serving.bench.results.recompute import RunOnDisk, read_run_on_disk
from pipeline.serving.recipe import tiny
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.report.check import OpenedReport, check_run, open_report
from pipeline.serving.serve.run import recipe_digest
from pipeline.weights.model import kept_locks
from pipeline.weights.place import LockedFolder, find_places
from pipeline.weights.sign.record import weights_record_path

# facts of a host are some hundred kilobytes; a folder that was named may hold anything
_MOST_FACTS_BYTES = 64 << 20
_MOST_PAGE_BYTES = 64 << 20
_MOST_FOLDERS = 1000
_MOST_FILES = 10_000
_MOST_SHOWN = 10
# Judges the files by a statement; the text is "signed" or "stated".
Compare = Callable[[Statement, str], list[Node]]


@dataclass(frozen=True)
class RunInputs:
    """Where to look for what a run names: a store, and folders of anything else."""

    store: Store | None
    folders: Sequence[Path] = ()


@dataclass(frozen=True)
class JudgedRun:
    """A run by itself: its numbers, and who signed them."""

    judged: JudgedEvidence
    run: BenchRun | None  # none where it cannot be read

    def with_inputs(self, sources: RunInputs, context: VerifyContext) -> JudgedEvidence:
        """The same, and all that the run depends on."""
        parts = _inputs(self.run, sources, context) if self.run else []
        children = (*self.judged.node.children, *(part.node for part in parts))
        believed = (*self.judged.believed, *(each for part in parts for each in part.believed))
        return JudgedEvidence(replace(self.judged.node, children=children), believed)


def judge_bench_run(
    folder: Path, items: Sequence[EvidenceItem], context: VerifyContext
) -> JudgedRun:
    """Computes the numbers of a run again, and says who signed them."""
    try:
        found = read_run_on_disk(folder)
    except errors.RunInvalid as error:
        return JudgedRun(JudgedEvidence(broken(str(folder), str(error))), None)

    def compare(statement: Statement, how: str) -> list[Node]:
        nodes = [_signed_file("result", RUN_FILE, found.digest, statement, how)]
        if found.requests is not None:
            return [*nodes, _signed_file("requests", REQUESTS_FILE, found.requests, statement, how)]
        message = f"{REQUESTS_FILE} is not beside the run"
        return [*nodes, Node("requests", Verdict.INCOMPLETE, message, code=Code.NO_REQUESTS)]

    parts = [
        judge_file_statement(item, BENCHMARK_RUN, "benchmark", context, compare)
        for item in distinct(items)
    ]
    if not items:
        message = "there is none: nobody says that this was measured"
        parts.append(JudgedEvidence(incomplete("statement", message)))
    if (run := found.claims) is None:
        parts.append(JudgedEvidence(broken("result", found.invalid)))
    else:
        named = run.inputs.workload
        title, message = f"workload {run.workload.name}", f"{named}, part of the run"
        workload = Node(title, message=message, part="workload")
        if found.workload != named:
            message = f"is {found.workload}, the run names {named}"
            workload = Node("workload", Verdict.CHANGED, message, part="workload")
        parts += [JudgedEvidence(_numbers(run, found)), JudgedEvidence(workload)]
    believed = tuple(each for judged in parts for each in judged.believed)
    title = f"{folder / RUN_FILE} {found.digest}"
    node = Node(title, children=tuple(w.node for w in parts))
    return JudgedRun(JudgedEvidence(node, believed), run)


def judge_file_statement(
    item: EvidenceItem, predicate_type: str, about: str, context: VerifyContext, compare: Compare
) -> JudgedEvidence:
    """Judges an envelope beside a file; it must be of this type, about what `about` names."""
    if item.envelope is None:
        return JudgedEvidence(broken(item.name, item.error))
    statement = item.envelope.statement
    kind = predicate_kind(statement.predicate_type)
    title = f"{kind} ({item.name})"
    signature, keys = judge_signatures(item.envelope, context.trust, context.now)
    try:
        if statement.predicate_type != predicate_type:
            raise errors.RecordInvalid(f"is no statement about a {about}")
        check_predicate(predicate_type, statement.predicate)
    except errors.RecordInvalid as error:
        return JudgedEvidence(Node(title, children=(signature, broken("predicate", str(error)))))
    nodes = [signature]
    # what an unbelieved statement says was changed may be its own lie: then it counts for nothing
    if signature.verdict is not Verdict.BROKEN:
        nodes += compare(statement, "signed" if item.envelope.signatures else "stated")
    opened = Opened(item.name, item.envelope, (signature,), tuple(keys))
    return JudgedEvidence(
        Node(title, children=tuple(nodes), subject=kind), (opened,) if keys else ()
    )


def _signed_file(title: str, file: str, digest: str, statement: Statement, how: str) -> Node:
    if statement.is_about(digest):
        return Node(title, message=f"every byte as {how}")
    return changed_node(title, f"{file} has {digest}, which was not {how}")


def _numbers(run: BenchRun, found: RunOnDisk) -> Node:
    """Computes every metric again from the raw requests."""
    title = "numbers"
    if found.unreadable:
        return changed_node(title, found.unreadable)
    if (numbers := found.numbers) is None:
        message = f"cannot be computed again: {REQUESTS_FILE} is not beside the run"
        return Node(title, Verdict.INCOMPLETE, message, code=Code.NO_REQUESTS)
    nodes = []
    for trial in numbers.damaged:
        message = f"the requests have {trial.digest}, the run names {trial.named}"
        nodes.append(changed_node(f"{trial.place}/requests ({trial.name})", message))
    if wrong := numbers.changed:
        children = []
        for each in wrong[:_MOST_SHOWN]:
            # people know a cell by its name, and each place begins with /cells/NUMBER
            cell = run.cells[int(each.place.split("/")[2])].cell.name
            message = f"is {each.now}, by its requests and samples it is {each.then}"
            children.append(changed_node(plain(f"{each.place} (cell {cell})"), plain(message)))
        message = f"{log.count(len(wrong), 'value')} changed"
        if len(wrong) > _MOST_SHOWN:
            message += f", the first {_MOST_SHOWN} are shown"
        nodes.append(Node("recomputed", message=message, children=tuple(children)))
    nodes += [changed_node("left out", plain(each)) for each in found.missing[:_MOST_SHOWN]]
    if nodes:
        return Node(title, children=tuple(nodes))
    requests = sum(t.requests.lines for cell in run.cells for t in cell.trials)
    counts = f"{log.count(requests, 'request')} of {log.count(len(numbers.trials), 'trial')}"
    return Node(title, message=f"the same again from {counts}")


def _inputs(run: BenchRun, sources: RunInputs, context: VerifyContext) -> list[JudgedEvidence]:
    """Judges each thing that the run names; one that it cannot find is missing, never valid."""
    client = f"{run.client.name} {run.client.version} {run.client.digest}"
    recipe = incomplete("recipe", "the run was not served from a recipe")
    name, digest = run.inputs.recipe_name, run.inputs.recipe
    if name is not None and digest is not None:
        own = [context.checkout.root / "recipes"] if context.checkout else []
        recipe = Node(f"recipe {name}", message=digest)
        try:
            now = recipe_digest(Recipes([*sources.folders, *own]).read(name))
            if now != digest:
                message = f"has changed since: it is {now}, the run had {digest}"
                recipe = stale(recipe.title, message)
        except errors.PipelineError as error:
            recipe = incomplete(recipe.title, f"{digest} cannot be compared: {error}")
    parts = {
        "image": _image(run.inputs.image, sources, context),
        "weights": _weights(run.inputs.weights, sources, context),
        "recipe": JudgedEvidence(recipe),
        HOST: _host(run.inputs.host, sources, context),
        "client": JudgedEvidence(Node("client", message=client)),
    }
    return [replace(w, node=replace(w.node, part=part)) for part, w in parts.items()]


def _missing(title: str, message: str) -> JudgedEvidence:
    return JudgedEvidence(incomplete(title, message))


def _titled(judged: JudgedEvidence, title: str) -> JudgedEvidence:
    return replace(judged, node=replace(judged.node, title=f"{title} {judged.node.title}"))


def _image(digest: str | None, sources: RunInputs, context: VerifyContext) -> JudgedEvidence:
    if digest is None:
        return _missing("image", "the run does not say which image served")
    if (store := sources.store) is not None:
        for path in store.image_paths():
            try:
                is_this = read_image_record(path).digest == digest
            # `store check` reports it
            except (errors.StoreDamaged, FileNotFoundError):
                continue
            if not is_this:
                continue
            name, platform = path.parts[-3], path.parts[-2].replace("-", "/", 1)
            title = f"{name} {platform}"
            try:
                with store.in_use():
                    items = gather_envelopes(kept_envelopes(store, name, platform, digest))
                    opened = open_image(store.blob_path(digest).parent, digest, title)
            except errors.PipelineError as error:
                return JudgedEvidence(broken(f"image {title} {digest}", str(error)))
            given = (context.trust, context.checkout, context.now)
            return _titled(walk_evidence(opened, items, *given, gates_may_wait=True), "image")
    # an OCI layout that was pulled or exported
    for folder in (f for f in sources.folders if (f / "index.json").is_file()):
        try:
            opened = open_layout(folder)
        except errors.PipelineError as error:
            # a damaged layout of this image, and not merely one of another
            with suppress(errors.PipelineError):
                if any(each.digest == digest for each in read_layout_index(folder).manifests):
                    return JudgedEvidence(broken(f"image {folder.name} {digest}", str(error)))
            continue
        if opened.digest == digest:
            attached = attached_in(folder, digest)
            attached.items += gather_envelopes(beside(folder))
            return _titled(judge_attached(opened, attached, context), "image")
    message = f"{digest} is not in the store here, nor in a layout that --look-in names"
    return _missing("image", message)


@cache
def _tiny_digest() -> str:
    return sha256_of(tiny.tiny_gguf())


def _weights(digest: str | None, sources: RunInputs, context: VerifyContext) -> JudgedEvidence:
    if digest is None:
        return _missing("weights", "the run does not say which weights were served")
    if digest == _tiny_digest():
        return JudgedEvidence(Node("weights", message="the tiny model, which this code makes"))
    locks = kept_locks(context.checkout) if context.checkout else []
    for folder in sources.folders:
        places: Sequence[LockedFolder] = ()
        with suppress(errors.WeightsUnknown):
            places = find_places(folder, locks)
        for place in (place for place in places if place.lock.seal == digest):
            record = weights_record_path(place)
            items = gather_envelopes([record] if record.exists() else [])
            return _titled(judge_weights(place, places, items, context), "weights")
    lock = next((lock for lock in locks if lock.seal == digest), None)
    if lock is None:
        return _missing("weights", f"no lock here has the seal {digest}")
    files = f"{len(lock.files)} files of {lock.repository} at {lock.commit[:12]}"
    message = f"the lock names {files}, which are not here (--look-in DIR)"
    return _missing(f"weights {lock.name}", message)


def _host(digest: str | None, sources: RunInputs, context: VerifyContext) -> JudgedEvidence:
    if digest is None:
        message = "no facts of the host were given"
        return JudgedEvidence(Node(HOST, Verdict.INCOMPLETE, message, code=Code.FACTS_NOT_GIVEN))
    path = next((p for p in _facts_files(sources, context) if sha256_of_file(p) == digest), None)
    if path is None:
        for other in _facts_files(sources, context):
            # a statement of those facts, beside a file that has changed since
            about = other.with_name(other.name.removesuffix(SUFFIX))
            (item,) = gather_envelopes([other]) if about != other and about.is_file() else (None,)
            if item and item.envelope and item.envelope.statement.is_about(digest):
                message = f"has {sha256_of_file(about)}, the run names {digest}"
                return JudgedEvidence(changed_node(f"{HOST} {about.name}", message))
        return _missing(HOST, f"{digest} is in none of the folders here (--look-in DIR)")
    # facts may be named by their statement, which is proof of itself
    about = path.with_name(path.name.removesuffix(SUFFIX))
    if not about.is_file():
        return _missing(f"{HOST} {path.name}", "the facts are not beside their statement")
    given = (context.trust, context.checkout, context.now)
    judged = _titled(
        walk_evidence(open_file(about), gather_envelopes(beside(about)), *given, only=HOST_FACTS),
        HOST,
    )
    return replace(judged, node=replace(judged.node, subject=str(about)))


def _facts_files(sources: RunInputs, context: VerifyContext) -> Iterator[Path]:
    own = [context.checkout.root / "records"] if context.checkout else []
    seen = 0
    for folder in (f for f in (*sources.folders, *own) if f.is_dir()):
        for path in sorted(folder.glob("*.json")):
            seen += 1
            if seen > _MOST_FILES:
                raise errors.EvidenceBroken(f"{folder}: more than {_MOST_FILES} files")
            if path.is_file() and path.stat().st_size <= _MOST_FACTS_BYTES:
                yield path


def judge_report(
    path: Path, items: Sequence[EvidenceItem], context: VerifyContext, sources: RunInputs
) -> JudgedEvidence:
    """From a page to its data, from there to the runs, and from each to all that it names."""
    try:
        page = read_plain(path, _MOST_PAGE_BYTES)
        if page is None:
            raise errors.ReportInvalid(f"larger than {_MOST_PAGE_BYTES} bytes")
        report = open_report(page)
    except (errors.ReportInvalid, OSError) as error:
        return JudgedEvidence(broken(str(path), str(error)))
    digest = sha256_of(page)

    def compare(statement: Statement, how: str) -> list[Node]:
        # the bytes of the page hold the data and all that people see
        if statement.is_about(digest):
            return [Node("page", message=f"every byte as {how}")]
        return [changed_node("page", f"has {digest}, which was not {how}")]

    parts = [judge_file_statement(i, REPORT, "report", context, compare) for i in distinct(items)]
    if not items:
        message = "there is none: nobody says that this report is theirs"
        parts.append(JudgedEvidence(incomplete("statement", message)))
    if problem := report.problem():
        parts.append(JudgedEvidence(changed_node("embedded data", problem)))
    parts += [_run(report, i, path, context, sources) for i in range(len(report.data.runs))]
    node = Node(f"{path} {digest}", children=tuple(w.node for w in parts))
    return JudgedEvidence(node, tuple(each for judged in parts for each in judged.believed))


def _run(
    report: OpenedReport, index: int, page: Path, context: VerifyContext, sources: RunInputs
) -> JudgedEvidence:
    """One run of a report, compared with it and then with all that the run depends on."""
    named, places = report.data.runs[index], (*sources.folders, page.parent)
    title = f"run {plain(named.name)}"
    folders: list[Path] = []
    for place in places:
        # `sm120 bench` keeps runs as bench/WORKLOAD, and with --output as runs/night/WORKLOAD
        for depth in ("", "*/", "*/*/", "*/*/*/"):
            runs = islice(place.glob(f"{depth}{RUN_FILE}"), _MOST_FOLDERS)
            folders += sorted(path.parent for path in runs if path.is_file())
    parts, file = Path(named.file).parent.parts, named.file
    alike = [f for f in folders if parts and f.resolve().parts[-len(parts) :] == parts]
    # by its digest: the folder of that name before a copy of it, and each once
    exact = (
        folder
        for folder in dict.fromkeys((*alike, *folders))
        if sha256_of_file(folder / RUN_FILE) == named.digest
    )
    # a run that was changed itself is found by its name
    found = next(exact, None) or next(iter(alike), None)
    # the result of another program; a page may be anybody's: no path leads elsewhere
    if found is None and Path(file).name == file:
        results = (p for place in places for p in (place / file, *place.glob(f"*/{escape(file)}")))
        for path in islice(results, _MOST_FOLDERS):
            with suppress(errors.RunInvalid):
                if read_foreign(path).digest == named.digest:
                    found = path
                    break
    if found is None:
        message = f"{named.digest} is in none of the folders here (--look-in DIR)"
        return JudgedEvidence(incomplete(title, message))
    problems = check_run(report, index, found)
    children = tuple(
        changed_node(plain(each.where) or "data", plain(each.message).replace("\n", " "))
        for each in problems[:_MOST_SHOWN]
    )
    message = f"{log.count(len(problems), 'place')} changed" if problems else "as in the run"
    same = Node("numbers of the report", message=message, children=children)
    if not (found / RUN_FILE).is_file():
        # the numbers of another program can be compared, but have no signature
        unsigned = incomplete("statement", f"a result of {plain(named.tool)} has none")
        return JudgedEvidence(Node(title, children=(same, unsigned)))
    within = RunInputs(sources.store, (*sources.folders, found, found.parent, page.parent))
    run = judge_bench_run(found, gather_envelopes(beside(found / RUN_FILE)), context)
    judged = run.with_inputs(within, context)
    return JudgedEvidence(Node(title, children=(same, judged.node)), judged.believed)
