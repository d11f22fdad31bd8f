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

from pipeline.core.errors import SourceUnreachable
from pipeline.core.foreign_json import read_json
from pipeline.core.net.address import masked, shown_address, without_controls
from pipeline.core.net.client import MAY_PASS, Reply
from pipeline.core.net.failures import Lost, NetError
from pipeline.core.net.http import NetClient, unreachable_error
from pipeline.core.net.timing import asked_wait_s

# Fewer than for a file: where one index of several is down, each file of an image asks it.
PAGE_ATTEMPTS = 3
# PyPI's largest pages, of projects with a build a day, have some tens of megabytes
MOST_PAGE_BYTES = 128 << 20
_HEAD_BYTES = 4096  # of a page: a <base> stands before the first link
_BASE_TAG = re.compile(rb"<base\b", re.I)


def find_file(
    client: NetClient, index: str, project: str, filename: str
) -> list[DistributionPackage]:
    """The index's entries for a file; none where it has no such project or file."""
    packages = list_index_files(client, index, project, filename)
    return [package for package in packages if package.filename == filename]


def list_index_files(
    client: NetClient, index: str, project: str, filename: str = ""
) -> list[DistributionPackage]:
    """Every file that an index has of a project; with a name, at least that one."""

    def failure(reason: object) -> SourceUnreachable:
        why = without_controls(masked(str(reason)))[:160]
        return SourceUnreachable(f"{masked(index)}: no answer about {project} ({why})")

    def once() -> list[DistributionPackage]:
        url = f"{index.rstrip('/')}/{canonicalize_name(project)}/"
        reply = client.fetch(url, MOST_PAGE_BYTES, {"Accept": ACCEPT_ANY})
        if reply.status == 404:
            return []
        if reply.status in MAY_PASS or reply.status >= 500:
            reason = f"{shown_address(reply.url)}: answers {reply.status}"
            raise Lost(reason, wait_s=asked_wait_s(reply.headers))
        if reply.status != 200:
            raise failure(f"answers {reply.status}")
        try:
            return _packages(reply, project, filename)
        except (UnsupportedContentTypeError, UnsupportedRepoVersionError) as error:
            raise failure(error) from error
        # a page cut off in the middle by a proxy looks like this, too
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Lost(
                f"{shown_address(reply.url)}: {without_controls(masked(str(error)))}"
            ) from error

    try:
        return client.retry_policy.retried(once, PAGE_ATTEMPTS)
    except Lost as error:
        raise failure(error) from error
    except NetError as error:
        raise unreachable_error(error) from error


def _packages(reply: Reply, project: str, filename: str) -> list[DistributionPackage]:
    """The page, cut down to one file first."""
    # Measured: 0.7 s for a page of 3,000 links, 2.2 s for 10,000.
    # An engine image has some 200 wheels, and each asks for a page.
    # JSON where the index has it (PEP 691), else HTML (PEP 503), which servers may leave unnamed
    kind = (reply.header("Content-Type") or "text/html").partition(";")[0].strip().lower()
    if kind.endswith("+json"):
        data = read_json(reply.data, most_bytes=MOST_PAGE_BYTES)
        if filename:
            data["files"] = [f for f in data["files"] if f["filename"] == filename]
        return ProjectPage.from_json_data(data, reply.url).packages
    if kind.endswith("html"):
        page, needle, links = reply.data, b">" + filename.encode() + b"</a>", list[bytes]()
        at = page.find(needle) if filename and not _BASE_TAG.search(page, 0, _HEAD_BYTES) else -1
        while at >= 0:
            links.append(page[page.rfind(b"<a", 0, at) : at + len(needle)])
            at = page.find(needle, at + 1)
        # the whole page where the links to that file are not written plainly
        page = b"<html><body>" + b"".join(links) + b"</body></html>" if links else page
        return ProjectPage.from_html(project, page, reply.url).packages
    raise UnsupportedContentTypeError(masked(reply.url), kind)
