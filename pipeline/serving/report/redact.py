"""A report without what identifies a machine or its owner; numbers and digests stay.

The same value gets the same placeholder everywhere, so that what belonged together still does.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from typing import Any

from pipeline.core.log import redacted
from pipeline.serving.report.build import place_of
from pipeline.serving.report.from_host import HOST
from pipeline.serving.report.model import ReportData

# What every vendor's own tokens begin with, to recognise one anywhere.
_TOKEN = re.compile(
    r"\b(?:hf_|gh[oprsu]_|github_pat_|glpat-|nvapi-|sk-|xox[abeprs]-|npm_|pypi-|dckr_pat_|AIza"
    r"|AKIA|ASIA)[\w./+-]{8,}=*"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)
# A value whose label says what it is: a variable, an option, a header, a field of JSON or YAML.
_LABELLED = re.compile(
    r"(?P<label>\b[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)[A-Z0-9_]*="
    r"|--[\w-]*(?:key|token|secret|password|passphrase)[ =]"
    r"|(?i:\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token)\s+)?)"
    r"|(?i:\b(?:bearer|basic)\s+)(?=[\w.~+/-]{12})"
    r"|(?i:\b(?:\w*api[-_ ]?key|\w*password|passwd|passphrase|\w*secret|cookie)[\"']?\s*[:=]\s*)"
    r"|(?i:\b\w*token[\"']?(?:=|\s*:\s*(?=[\"']?[^\s\"']{16}))))"
    r"(?P<quote>[\"']?)(?P<value>[^\s\"',;]+)"
)
# Random letters and digits, many of each; names of kernels have underscores, or few digits.
_RANDOM = re.compile(
    r"(?<![\w+/-])(?=(?:[A-Za-z+/]*[0-9]){5})(?=(?:[a-z0-9+/]*[A-Z]){4})"
    r"(?=(?:[A-Z0-9+/]*[a-z]){4})[A-Za-z0-9+/]{40,}={0,2}(?![\w+/-])"
)
_URL = re.compile(r"\b(\w+://)(?:[^/\s@]*@)?(\[[^]\s]*\]|[^/\s:\"'<>]+)")
_ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
# What may be an IPv6 address; times and PCI addresses look alike, so each is read as one.
_ADDRESS6 = re.compile(r"(?<![\w:.])[0-9a-fA-F:]*:[0-9a-fA-F:]*:[0-9a-fA-F:.]*(?:%\w+)?(?![\w:])")
# Ranks of nodes meet at ports, and names of hosts inside a company end with these.
_HOST = re.compile(
    r"(?<![\w.@/-])(?:[A-Za-z0-9][\w-]*\.)+"
    r"(?:local|localdomain|lan|internal|corp|intra|intranet|home|arpa|example|test)\b(?!\.\w)"
    r"|(?<![\w.@/:-])(?!(?:sha256|localhost):|redacted-)[A-Za-z][\w-]*(?:\.[\w-]+)*(?=:\d{4,5}(?![\w.]))"
)
_SOURCE = re.compile(r"\.(?:py|pyx|c|cc|cpp|cu|cuh|h|hpp|rs|go|js|ts|yaml|json|log)$")
# Home folders anywhere, also inside of addresses of files, with the name of their owner.
_HOME = re.compile(
    r"(?i)(?:/|\\+|%2f)(?:home|users|root)(?:/|\\+|%2f)([^\s/\\%\"':,;<>|)]+)[^\s\"',;<>|)]*"
    r"|(?<![\w~])~([a-z_][\w.-]*)/[^\s\"',;<>|)]*|(?<![\w/])/root\b"
)
# In the order in which they are replaced: what has a UUID in it is no serial number.
_KINDS = (
    ("uuid", re.compile(r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")),
    ("mac", re.compile(r"\b[0-9a-fA-F]{2}(?:([:-])[0-9a-fA-F]{2})(?:\1[0-9a-fA-F]{2}){4}\b")),
    ("machine", re.compile(r"\b[0-9a-f]{32}\b")),
    # a login such as user@host or a mail address; not IMAGE@sha256:
    ("mail", re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?!sha256:)[\w-]+(?:\.[\w-]+)*")),
)
_SERIAL = re.compile(
    r"(?i)(\b(?:serial(?:[ _-]?(?:number|no))?|s/?n)\b[\"']?>?\s*[:=#\s]\s*[\"']?|<serial>)"
    r"([A-Z0-9][A-Z0-9-]{4,})"
)
# From the root, at least two levels; not a part of a name such as org/model, nor those
# that every machine has.
_PATH = re.compile(
    r"(?<![\w./~-])(?!/(?:proc|sys|dev|usr/lib|lib|lib64)/)(?:~|/[\w.@+-]+)(?:/[\w.@+:-]+)+/?"
)
_LOOPBACK = ("127.0.0.1", "localhost", "0.0.0.0", "::1", "::")  # noqa: S104
_RUN_FOLDER = re.compile(r"^(?:[^/]+/)+bench\.json$")
# Accounts that installers make: they name nobody, and stand in many texts.
_NOBODY = frozenset({"root", "localhost", "ubuntu", "debian", "user", "admin", "shared"})
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL")


class Redactor:
    """Placeholders by the value that they replace."""

    def __init__(self, names: Collection[str] = ()) -> None:
        parts = {part for name in names for part in (name, *name.split("@"))}
        self._known = {part for part in parts if len(part) > 2} - _NOBODY
        self._given: dict[str, str] = {}
        # whatever failed may quote a proxy's password or a registry's key
        self._secrets = [v for n, v in os.environ.items() if _SECRET_NAME.search(n.upper())]
        self._names: re.Pattern[str] | None = None
        self.learn(())

    def learn(self, texts: Collection[str]) -> None:
        """Learns the owners of home folders in texts, to redact these names anywhere."""
        for text in texts:
            owners = {match[1] or match[2] or "" for match in _HOME.finditer(text)}
            self._known |= {owner for owner in owners if len(owner) > 2} - _NOBODY
        # longer first: a short name may be a part of a long one
        ordered = sorted(self._known, key=lambda name: (-len(name), name))
        alternatives = "|".join(map(re.escape, ordered))
        self._names = re.compile(rf"(?i)(?<![\w-])(?:{alternatives})(?![\w-])") if ordered else None

    def name(self, kind: str, value: str) -> str:
        """The placeholder of a value."""
        return self._given.setdefault(value, f"redacted-{kind}-{len(self._given)}")

    def text(self, text: str) -> str:
        """A text without secrets, names, addresses, paths and serial numbers."""

        def replaced(kind: str, match: re.Match[str], *, kept: bool = False) -> str:
            return match[0] if kept else self.name(kind, match[0])

        def address(match: re.Match[str]) -> str:
            try:
                ip_address(match[0].partition("%")[0])
            except ValueError:
                return match[0]
            return replaced("address", match, kept=match[0] in _LOOPBACK)

        # secrets first: no pattern finds half of one
        text = redacted(text, more=self._secrets)
        text = _TOKEN.sub(partial(replaced, "token"), text)
        text = _LABELLED.sub(
            lambda m: f"{m['label']}{m['quote']}{self.name('token', m['value'])}", text
        )
        text = _RANDOM.sub(partial(replaced, "token"), text)
        # addresses in URLs before the rest: what is left of them has no host
        text = _URL.sub(
            lambda m: m[1] + (m[2] if m[2].strip("[]") in _LOOPBACK else self.name("host", m[2])),
            text,
        )
        text = _HOME.sub(partial(replaced, "path"), text)
        for kind, pattern in _KINDS:
            text = pattern.sub(partial(replaced, kind), text)
        text = _SERIAL.sub(lambda m: m[1] + self.name("serial", m[2]), text)
        text = _ADDRESS6.sub(address, _ADDRESS.sub(address, text))
        text = _PATH.sub(partial(replaced, "path"), text)
        # a line of a source file looks like the port of a host
        text = _HOST.sub(lambda m: replaced("host", m, kept=bool(_SOURCE.search(m[0]))), text)
        if self._names is not None:
            text = self._names.sub(partial(replaced, "name"), text)
        return text

    def value(self, value: Any) -> Any:
        """Every text inside of a value of JSON."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(each) for each in value]
        if isinstance(value, dict):
            return {name: self.value(each) for name, each in value.items()}
        return value


def own_names() -> set[str]:
    """Names of this machine and its user, which texts may hold anywhere."""
    own = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    # not every number of a user has a name
    with suppress(KeyError, OSError):
        own.add(getpass.getuser())
    return own


def redact_report(data: ReportData, names: Collection[str] = ()) -> ReportData:
    """The same report to paste in public; published documents stay as they are."""
    # the name of a folder is often that of a machine or a customer; it tells runs apart
    folders = {f"({place_of(run)})" for run in data.runs}
    hosts = {f.value for run in data.runs for f in run.hardware if f.name == HOST}
    redactor = Redactor({*own_names(), *names, *folders, *hosts})
    body = data.model_dump(mode="json")
    for part in ("title", "runs", "attempts", "findings"):
        body[part] = redactor.value(body[part])
    # a page without results of quality has no such field; what a vendor publishes is public
    for line in body.get("quality", []):
        line |= redactor.value({name: line[name] for name in ("model", "value")})
    for run in body["runs"]:
        for fact in (fact for fact in run["hardware"] if fact["name"] == HOST):
            fact["value"] = "redacted"
        run["file"] = _RUN_FOLDER.sub("run/bench.json", run["file"])
    return ReportData.model_validate({**body, "redacted": True})
