"""What a Python package index says of one file."""

from __future__ import annotations

import re

from pypi_simple import (
    ACCEPT_ANY,
    DistributionPackage,
    ProjectPage,
    PyPISimple,
    UnsupportedContentTypeError,
    UnsupportedRepoVersionError,
)
from requests import RequestException, Response

from pipeline.errors import SourceUnreachable
from pipeline.fetch import http
from pipeline.fetch.http import Client
from pipeline.fetch.settings import masked

PAGE_ATTEMPTS = 3
_HEAD_BYTES = 4096
_BASE_TAG = re.compile(rb"<base\b", re.I)


def find_file(client: Client, index: str, project: str, filename: str) -> list[DistributionPackage]:
    """The index's entries for a file; none where it has no such project or file."""
    found = _ask_patiently(client, index, project, filename)
    return [package for package in found if package.filename == filename]


def list_files(client: Client, index: str, project: str) -> list[DistributionPackage]:
    """Every file that an index has of a project."""
    return _ask_patiently(client, index, project, "")


def _ask_patiently(
    client: Client, index: str, project: str, filename: str
) -> list[DistributionPackage]:
    reason: object = ""
    for attempt in range(PAGE_ATTEMPTS):
        if attempt:
            client.pause(attempt - 1, None)
        try:
            return _ask(client, index, project, filename)
        except (UnsupportedContentTypeError, UnsupportedRepoVersionError) as error:
            reason = error
            break
        except (RequestException, ValueError, KeyError, TypeError) as error:
            reason = error
            if _is_refusal(error):
                break
    words = masked(" ".join(str(reason).split()))[:160]
    raise SourceUnreachable(f"{masked(index)}: no answer about {project} ({words})")


def _ask(client: Client, index: str, project: str, filename: str) -> list[DistributionPackage]:
    url = PyPISimple(index, session=client.session).get_project_url(project)
    answer = client.session.get(url, timeout=http.READ_TIMEOUT_S, headers={"Accept": ACCEPT_ANY})
    if answer.status_code == 404:
        return []
    answer.raise_for_status()
    page = _page(answer, project, filename) if filename else None
    return (page or ProjectPage.from_response(answer, project)).packages


def _page(answer: Response, project: str, filename: str) -> ProjectPage:
    """The page, cut down to one file first: the library takes a second for ten thousand."""
    kind = answer.headers.get("content-type", "text/html").partition(";")[0].strip().lower()
    if kind.endswith("+json"):
        data = answer.json()
        data["files"] = [f for f in data["files"] if f["filename"] == filename]
        return ProjectPage.from_json_data(data, answer.url)
    if kind.endswith("html"):
        return ProjectPage.from_html(project, narrowed(answer.content, filename), answer.url)
    return ProjectPage.from_response(answer, project)


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


def _is_refusal(error: Exception) -> bool:
    """An answer that will be the same next time, like 403."""
    answer = error.response if isinstance(error, RequestException) else None
    return answer is not None and 400 <= answer.status_code < 500 and answer.status_code != 429
