"""A report without what identifies a machine or its owner; numbers and digests stay.

The same value gets the same placeholder everywhere, so that what belonged together still does.
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from pipeline.serving.report.build import place_of
from pipeline.serving.report.from_host import HOST
from pipeline.serving.report.model import ReportData

_URL = re.compile(r"\b(https?://)(?:[^/\s@]*@)?(\[[^]\s]*\]|[^/\s:\"'<>]+)")
_ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_ADDRESS6 = re.compile(
    r"(?<![\w:])(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{0,4}(?![\w:])"
    r"|(?<![\w:])[0-9a-fA-F]{1,4}(?::[0-9a-fA-F]{1,4})*::[0-9a-fA-F:]*"
)
_UUID = re.compile(r"\b(?:GPU-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
_MAC = re.compile(r"\b[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}\b")
_SERIAL = re.compile(r"(?i)\b(serial(?: ?number)?[:= ] ?)([A-Z0-9-]{5,})")
_MAIL = re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")
# From the root, at least two levels; not a part of a name such as org/model.
_PATH = re.compile(r"(?<![\w./:~-])(?:~|/[\w.@+-]+)(?:/[\w.@+:-]+)+/?")
_LOOPBACK = ("127.0.0.1", "localhost", "0.0.0.0", "::1")  # noqa: S104
_RUN_FOLDER = re.compile(r"^(?:[^/]+/)+bench\.json$")


class Redactor:
    """Placeholders by the value that they replace."""

    def __init__(self, names: Collection[str] = ()) -> None:
        # longer first: a short name may be a part of a long one
        ordered = sorted({n for n in names if len(n) > 2}, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, ordered))
        self._names = re.compile(rf"(?<![\w-])(?:{alternatives})(?![\w-])") if ordered else None
        self._given: dict[str, str] = {}

    def name(self, kind: str, value: str) -> str:
        """The placeholder of a value."""
        return self._given.setdefault(value, f"redacted-{kind}-{len(self._given)}")

    def text(self, text: str) -> str:
        """A text without names, addresses, paths and serial numbers."""

        def host(match: re.Match[str]) -> str:
            is_own = match[2].strip("[]") in _LOOPBACK
            return match[1] + (match[2] if is_own else self.name("host", match[2]))

        def address(match: re.Match[str]) -> str:
            return match[0] if match[0] in _LOOPBACK else self.name("address", match[0])

        # addresses in URLs first: what is left of them has no host
        text = _URL.sub(host, text)
        text = _MAIL.sub(lambda m: self.name("mail", m[0]), text)
        text = _UUID.sub(lambda m: self.name("uuid", m[0]), text)
        text = _MAC.sub(lambda m: self.name("mac", m[0]), text)
        text = _SERIAL.sub(lambda m: m[1] + self.name("serial", m[2]), text)
        text = _ADDRESS6.sub(address, _ADDRESS.sub(address, text))
        text = _PATH.sub(lambda m: self.name("path", m[0]), text)
        if self._names is not None:
            text = self._names.sub(lambda m: self.name("name", m[0]), text)
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


def redact_report(data: ReportData, names: Collection[str] = ()) -> ReportData:
    """The same report to paste in public; published documents stay as they are."""
    # names of this machine and its user, which texts may hold anywhere
    own = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    # not every number of a user has a name
    with suppress(KeyError, OSError):
        own.add(getpass.getuser())
    # they name nobody, and stand in many texts
    own -= {"root", "localhost"}
    # the name of a folder is often that of a machine or a customer; it tells runs apart
    folders = {f"({place_of(run)})" for run in data.runs}
    hosts = {f.value for run in data.runs for f in run.hardware if f.name == HOST}
    redactor = Redactor({*own, *names, *folders, *hosts})
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
