"""One advisory as OSV or Debian's tracker publishes it, and the versions that it is about.

The format and how its ranges are evaluated: https://ossf.github.io/osv-schema/. This module reads
only the fields that it needs, and refuses a database in which one of them is malformed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from pipeline.artifacts.attest.predicates import SEVERITIES, Severity
from pipeline.core.errors import DatabaseInvalid, IndexBroken
from pipeline.images.lock.debian import version_key

# Maps the words of GitHub, Debian and others to one scale.
_WORDS: dict[str, Severity] = {
    **{each: each for each in SEVERITIES},
    **{"moderate": "medium", "unimportant": "none", "negligible": "low"},
}
# Debian's tracker names releases, OSV numbers them: https://www.debian.org/releases/
DEBIAN = {"buster": "10", "bullseye": "11", "bookworm": "12", "trixie": "13", "forky": "14"}
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{2,99}")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?Z")
_SEMVER = re.compile(
    r"v?(\d{1,18})\.(\d{1,18})\.(\d{1,18})(?:-([0-9A-Za-z.-]+))?(?:\+[0-9A-Za-z.-]+)?"
)
_SEMVER_ECOSYSTEMS = ("crates.io", "npm", "Go")
_EVENTS = ("introduced", "fixed", "last_affected", "limit")
_MOST_TEXT = 200  # characters of a summary: the rest is one click away


@dataclass(frozen=True)
class Affected:
    """One package that an advisory is about, and which of its versions."""

    ecosystem: str
    release: str  # of a distribution, such as 12; empty if it is about all of them
    name: str
    versions: frozenset[str] = frozenset()
    ranges: tuple[tuple[tuple[str, str], ...], ...] = ()  # of events: what happens, at what version

    @property
    def fixed(self) -> list[str]:
        """The versions that are no longer affected."""
        return [at for each in self.ranges for what, at in each if what == "fixed"]


@dataclass(frozen=True)
class Advisory:
    """One advisory; `severity` is the worst that any of its ratings gives."""

    id: str
    aliases: tuple[str, ...]
    severity: Severity
    published: datetime | None
    modified: datetime | None  # the tracker has no times
    summary: str
    affected: tuple[Affected, ...]
    is_withdrawn: bool = False


def order_key(ecosystem: str, version: str) -> Any:
    """A key that sorts versions as their ecosystem does; none if it is not known how."""
    try:
        if ecosystem == "PyPI":
            return Version(version)
        if ecosystem == "Debian":
            return version_key(version)
    except (InvalidVersion, IndexBroken):
        return None
    found = _SEMVER.fullmatch(version) if ecosystem in _SEMVER_ECOSYSTEMS else None
    if found is None:
        return None
    # semver.org: a pre-release comes before its release, numbers before words
    words = (found[4] or "").split(".") if found[4] else []
    before = [(0, int(w), "") if w.isdecimal() else (1, 0, w) for w in words]
    return (*(int(found[each]) for each in (1, 2, 3)), not words, before)


def is_affected(about: Affected, version: str) -> bool | None:
    """Whether a version is affected; none if it cannot be compared with the advisory."""
    own = order_key(about.ecosystem, version)
    # a local label, as torch's +cu130, is the same release to whoever wrote the advisory
    public = version
    if isinstance(own, Version):
        public = own.public
        # however it is spelled: 1.0-RC1 is 1.0rc1, and 1.0 is 1.0.0
        if {own, Version(public)} & {order_key("PyPI", x) for x in about.versions}:
            return True
    if version in about.versions or public in about.versions:
        return True
    known = bool(about.versions)
    for events in about.ranges:
        keys = [None if at == "0" else order_key(about.ecosystem, at) for _, at in events]
        if own is None or any(
            k is None and at != "0" for k, (_, at) in zip(keys, events, strict=True)
        ):
            known = False
            continue
        known, is_in = True, False
        # `0` precedes all versions; a version both fixed and introduced counts as introduced
        placed = [(k is not None, k, what) for k, (what, _) in zip(keys, events, strict=True)]
        limits = [key for _, key, what in placed if what == "limit"]
        ordered = sorted((x for x in placed if not x[0]), key=lambda x: x[2] == "introduced")
        ordered += sorted((x for x in placed if x[0]), key=lambda x: (x[1], x[2] == "introduced"))
        for is_version, key, what in ordered:
            if what == "introduced" and (not is_version or own >= key):
                is_in = True
            elif what == "fixed" and (not is_version or own >= key):
                is_in = False
            elif what == "last_affected" and is_version:
                # 2.7.1+cu128 is no later release than 2.7.1
                mine = (
                    order_key(about.ecosystem, public) if not getattr(key, "local", None) else own
                )
                is_in = is_in and mine <= key
        if is_in and (not limits or any(own < each for each in limits)):
            return True
    return False if known else None


def _text(value: Any, what: str, most: int = 4096) -> str:
    if not isinstance(value, str) or not value or len(value) > most:
        raise DatabaseInvalid(f"{what}: is no text of at most {most} characters")
    if not value.isprintable():
        raise DatabaseInvalid(f"{what}: has characters that cannot be seen")
    return value


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DatabaseInvalid(f"{what}: is no JSON object")
    return value


def _list(value: Any, what: str, most: int = 100_000) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise DatabaseInvalid(f"{what}: is no list of at most {most} values")
    return value


def _time(value: Any, what: str) -> datetime:
    found = _STAMP.fullmatch(value) if isinstance(value, str) else None
    try:
        if found:
            return datetime.fromisoformat(found[1]).replace(tzinfo=UTC)
    except ValueError:
        pass
    raise DatabaseInvalid(f"{what}: is not a time like 2026-01-31T12:00:00Z")


def read_osv(record: Any, what: str) -> Advisory:
    """A record in OSV's format, of unknown origin."""
    body = _table(record, what)
    if not _ID.fullmatch(identity := _text(body.get("id"), f"{what}: id", 100)):
        raise DatabaseInvalid(f"{what}: {identity!r} is not the id of an advisory")
    what = f"{what}: {identity}" if identity not in what else what
    # 1.x only adds fields; another major version may mean other things by the same names
    if not re.fullmatch(r"1\.\d+(\.\d+)?", schema := body.get("schema_version", "1.0.0") or ""):
        raise DatabaseInvalid(f"{what}: is of the OSV schema {schema!r}, and 1.x is read here")
    modified = _time(body.get("modified"), f"{what}: modified")
    published = _time(body["published"], f"{what}: published") if "published" in body else None
    aliases = [_text(x, f"{what}: aliases", 100) for x in _list(body.get("aliases") or [], what)]
    affected: list[Affected] = []
    ratings = [*_ratings(body, what)]
    for each in _list(body.get("affected") or [], f"{what}: affected"):
        about = _table(each, f"{what}: affected")
        ratings += _ratings(about, what)
        if "package" not in about:
            continue  # names commits of a repository: a bill cannot list those
        package = _table(about["package"], f"{what}: package")
        ecosystem = _text(package.get("ecosystem"), f"{what}: ecosystem", 100)
        kind, _, release = ecosystem.partition(":")
        name = _text(package.get("name"), f"{what}: name", 300)
        ranges = []
        for span in _list(about.get("ranges") or [], f"{what}: ranges"):
            kind_of_range = _table(span, f"{what}: ranges").get("type")
            if kind_of_range not in ("ECOSYSTEM", "SEMVER", "GIT"):
                raise DatabaseInvalid(f"{what}: a range of the unknown type {kind_of_range!r}")
            events = []
            for event in _list(span.get("events"), f"{what}: events"):
                named = [(k, v) for k, v in _table(event, f"{what}: events").items()]
                if len(named) != 1 or named[0][0] not in _EVENTS:
                    raise DatabaseInvalid(
                        f"{what}: an event that is not one of {', '.join(_EVENTS)}"
                    )
                events.append((named[0][0], _text(named[0][1], f"{what}: events", 300)))
            if not any(happens == "introduced" for happens, _ in events):
                raise DatabaseInvalid(f"{what}: a range in which nothing is introduced")
            # commits cannot be compared with the version of a package; a limit of `*` is none
            kept = tuple(x for x in events if x != ("limit", "*"))
            ranges += [kept] if kind_of_range != "GIT" else []
        versions = _list(about.get("versions") or [], f"{what}: versions")
        affected.append(
            Affected(
                ecosystem=kind,
                release=release,
                name=canonicalize_name(name) if kind == "PyPI" else name,
                versions=frozenset(_text(x, f"{what}: versions", 300) for x in versions),
                ranges=tuple(ranges),
            )
        )
    summary = body.get("summary") or body.get("details") or ""
    if not isinstance(summary, str):
        raise DatabaseInvalid(f"{what}: summary: is no text")
    return Advisory(
        id=identity,
        aliases=tuple(dict.fromkeys(x for x in aliases if x != identity)),
        severity=max(ratings, key=SEVERITIES.index, default="unrated"),
        published=published,
        modified=modified,
        summary=" ".join(summary.split())[:_MOST_TEXT],
        affected=tuple(affected),
        is_withdrawn="withdrawn" in body and bool(_time(body["withdrawn"], f"{what}: withdrawn")),
    )


# first.org/cvss/v3.1/specification-document has the numbers and the formula
_CVSS3: dict[str, dict[str, float]] = {
    "AV": {"N": 0.85, "A": 0.62, "L": 0.55, "P": 0.2},
    "AC": {"L": 0.77, "H": 0.44},
    "PR": {"N": 0.85, "L": 0.62, "H": 0.27},
    "UI": {"N": 0.85, "R": 0.62},
    "S": {"U": 0, "C": 1},
    **{name: {"H": 0.56, "L": 0.22, "N": 0} for name in "CIA"},
}
# a privilege counts for more if it reaches another component
_PR_CHANGED = {"N": 0.85, "L": 0.68, "H": 0.5}
# tenths of a score, and what it is called
_STEPS: list[tuple[int, Severity]] = [(90, "critical"), (70, "high"), (40, "medium"), (1, "low")]


def _ratings(body: Mapping[str, Any], what: str) -> Iterator[Severity]:
    """Every rating of a record, or of a package in it: CVSS 3 by its formula, words as they are."""
    for rating in _list(body.get("severity") or [], f"{what}: severity"):
        kind, score = (_table(rating, f"{what}: severity").get(x) for x in ("type", "score"))
        vector = _text(score, f"{what}: severity", 300)
        if kind != "CVSS_V3":
            continue  # version 4 needs a table of 270 numbers; its records also have a word
        head, *parts = vector.split("/")
        metrics = dict(part.split(":", 1) for part in parts if ":" in part)
        try:
            av, ac, pr, ui, scope, *impacts = (_CVSS3[name][metrics[name]] for name in _CVSS3)
        except KeyError as error:
            raise DatabaseInvalid(f"{what}: {vector!r} is not a CVSS vector ({error})") from error
        if head not in ("CVSS:3.0", "CVSS:3.1"):
            raise DatabaseInvalid(f"{what}: {vector!r} is not a CVSS 3 vector")
        base = 1 - math.prod(1 - each for each in impacts)
        pr = _PR_CHANGED[metrics["PR"]] if scope else pr
        impact = 7.52 * (base - 0.029) - 3.25 * (base - 0.02) ** 15 if scope else 6.42 * base
        total = (1.08 if scope else 1) * (impact + 8.22 * av * ac * pr * ui)
        # rounds up to a tenth in the specification's own way, which float errors cannot disturb
        tenths = 0 if impact <= 0 else -(-round(min(total, 10) * 100_000) // 10_000)
        yield next((word for least, word in _STEPS if tenths >= least), "none")
    for place in ("database_specific", "ecosystem_specific"):
        words = body.get(place)
        for key in ("severity", "urgency"):
            word = words.get(key) if isinstance(words, dict) else None
            if isinstance(word, str) and word.lower() in _WORDS:
                yield _WORDS[word.lower()]


def read_tracker(dump: Mapping[str, Any], what: str) -> Iterator[tuple[str, Advisory]]:
    """Yields every issue of a dump of Debian's security tracker, with its package.

    Skips releases for which the status is undetermined.

    https://security-tracker.debian.org/tracker/data/json
    """
    for package, issues in dump.items():
        name = _text(package, f"{what}: package", 300)
        for identity, issue in _table(issues, f"{what}: {name}").items():
            place = f"{what}: {name}: {identity[:40]}"
            if not _ID.fullmatch(identity):
                raise DatabaseInvalid(f"{place}: is not the id of an issue")
            affected, ratings = [], list[Severity]()
            releases = _table(issue, place).get("releases")
            for release, state in _table(releases, f"{place}: releases").items():
                status = _table(state, f"{place}: {release}").get("status")
                if status not in ("open", "resolved", "undetermined"):
                    raise DatabaseInvalid(f"{place}: {release}: the unknown status {status!r}")
                urgency = state.get("urgency", "not yet assigned")
                ratings.append(_WORDS.get(_text(urgency, f"{place}: urgency", 100), "unrated"))
                fixed = _text(state.get("fixed_version", "0"), f"{place}: fixed_version", 300)
                # tracker: fixed in 0 means that this release never had it
                if status == "undetermined" or (status == "resolved" and fixed == "0"):
                    continue
                events = [
                    ("introduced", "0"),
                    *([("fixed", fixed)] if status == "resolved" else []),
                ]
                number = DEBIAN.get(release, release)
                affected.append(Affected("Debian", number, name, ranges=(tuple(events),)))
            summary = issue.get("description") or ""
            if not isinstance(summary, str):
                raise DatabaseInvalid(f"{place}: description: is no text")
            worst: Severity = max(ratings, key=SEVERITIES.index, default="unrated")
            short = " ".join(summary.split())[:_MOST_TEXT]
            yield name, Advisory(identity, (), worst, None, None, short, tuple(affected))
