"""Files of a project, as a Python package index lists them."""

from __future__ import annotations

import re

from packaging.utils import canonicalize_name
from pypi_simple import (
    ACCEPT_ANY,
    DistributionPackage,
    ProjectPage,
    UnsupportedContentTypeError,
    UnsupportedRepoVersionError,
)

from pipeline.errors import SourceUnreachable
from pipeline.fetch.http import Client, unreachable
from pipeline.foreign_json import read_json
from pipeline.net.address import clean, masked
from pipeline.net.client import MAY_PASS, Reply
from pipeline.net.failures import Lost, NetError
from pipeline.net.timing import asked_wait_s

PAGE_ATTEMPTS = 3
# PyPI's largest pages, of projects with a build a day, have some tens of megabytes
MOST_PAGE_BYTES = 128 << 20
_HEAD_BYTES = 4096
_BASE_TAG = re.compile(rb"<base\b", re.I)


def find_file(client: Client, index: str, project: str, filename: str) -> list[DistributionPackage]:
    """The index's entries for a file; none where it has no such project or file."""
    packages = _ask_patiently(client, index, project, filename)
    return [package for package in packages if package.filename == filename]


def list_files(client: Client, index: str, project: str) -> list[DistributionPackage]:
    """Every file that an index has of a project."""
    return _ask_patiently(client, index, project, "")


def _ask_patiently(
    client: Client, index: str, project: str, filename: str
) -> list[DistributionPackage]:
    reason, wait_s = "", None
    for attempt in range(PAGE_ATTEMPTS):
        if attempt:
            client.pause(attempt - 1, wait_s)
        try:
            reply = _ask(client, index, project)
            if reply.status == 200:
                return _packages(reply, project, filename)
        except (UnsupportedContentTypeError, UnsupportedRepoVersionError) as error:
            reason = str(error)
            break
        except (ValueError, KeyError, TypeError, AttributeError, Lost) as error:
            reason, wait_s = str(error), None
            continue
        except NetError as error:
            raise unreachable(error) from error
        if reply.status == 404:
            return []
        reason, wait_s = f"answers {reply.status}", asked_wait_s(reply.headers)
        if reply.status < 500 and reply.status not in MAY_PASS:
            break
    raise SourceUnreachable(
        f"{masked(index)}: no answer about {project} ({clean(masked(reason))[:160]})"
    )


def _ask(client: Client, index: str, project: str) -> Reply:
    url = f"{index.rstrip('/')}/{canonicalize_name(project)}/"
    return client.page(url, MOST_PAGE_BYTES, {"Accept": ACCEPT_ANY})


def _packages(reply: Reply, project: str, filename: str) -> list[DistributionPackage]:
    """The page, cut down to one file first: the library takes a second for ten thousand."""
    kind = (reply.header("Content-Type") or "text/html").partition(";")[0].strip().lower()
    if kind.endswith("+json"):
        data = read_json(reply.data, most_bytes=MOST_PAGE_BYTES)
        if filename:
            data["files"] = [f for f in data["files"] if f["filename"] == filename]
        return ProjectPage.from_json_data(data, reply.url).packages
    if kind.endswith("html"):
        page = narrowed(reply.data, filename) if filename else reply.data
        return ProjectPage.from_html(project, page, reply.url).packages
    raise UnsupportedContentTypeError(masked(reply.url), kind)


def narrowed(page: bytes, filename: str) -> bytes:
    """Only the links to one file; the whole page where they are not written plainly."""
    needle = b">" + filename.encode() + b"</a>"
    at = page.find(needle)
    if at < 0 or _BASE_TAG.search(page, 0, _HEAD_BYTES):
        return page
    links = []
    while at >= 0:
        links.append(page[page.rfind(b"<a", 0, at) : at + len(needle)])
        at = page.find(needle, at + 1)
    return b"<html><body>" + b"".join(links) + b"</body></html>"
