"""A page cut down to one file lists the same as the whole page."""

from __future__ import annotations

import pytest
from pypi_simple import DistributionPackage, ProjectPage

from pipeline.core.net.client import Reply
from pipeline.images.fetch import index

BASE = "http://127.0.0.1/simple/thing/"
FILE = "thing-1.0-py3-none-any.whl"
PAGE = b"""<!DOCTYPE html><html><head><title>thing</title></head><body>
<a href="../../files/thing-0.9.tar.gz#sha256=00">thing-0.9.tar.gz</a><br/>
<a href="../../files/thing-1.0-py3-none-any.whl#sha256=aa" data-requires-python="&gt;=3.8"
   >thing-1.0-py3-none-any.whl</a>
<a href="../../files/thing-1.0-py3-none-any.whl.asc">thing-1.0-py3-none-any.whl.asc</a>
</body></html>"""


def listed(page: bytes, filename: str = FILE) -> list[DistributionPackage]:
    return index._packages(Reply(200, BASE, {}, page), "thing", filename)


def entries(page: bytes) -> list[DistributionPackage]:
    packages = ProjectPage.from_html("thing", page, BASE).packages
    return [p for p in packages if p.filename == FILE]


def is_read_whole(page: bytes, filename: str = FILE) -> bool:
    return listed(page, filename) == ProjectPage.from_html("thing", page, BASE).packages


def test_one_files_link_is_kept_with_all_it_says() -> None:
    assert listed(PAGE) == entries(PAGE)
    assert listed(PAGE)[0].digests == {"sha256": "aa"}
    assert not is_read_whole(PAGE)


def test_every_link_to_the_file_is_kept() -> None:
    twice = PAGE.replace(
        b"</body>", b'<a href="/b/thing-1.0-py3-none-any.whl">' + FILE.encode() + b"</a>"
    )
    assert len(listed(twice)) == 2


def test_a_page_that_does_not_write_the_name_plainly_is_read_whole() -> None:
    assert is_read_whole(
        PAGE.replace(b">thing-1.0-py3-none-any.whl<", b">\n thing-1.0-py3-none-any.whl <")
    )


def test_a_page_with_a_base_address_is_read_whole() -> None:
    assert is_read_whole(
        PAGE.replace(b"<head>", b'<head><BASE href="http://127.0.0.1/elsewhere/">')
    )


@pytest.mark.parametrize("name", ["thing-2.0-py3-none-any.whl", ""])
def test_where_no_listed_file_is_asked_for_the_page_is_read_whole(name: str) -> None:
    assert is_read_whole(PAGE, name)
    assert entries(PAGE.replace(b"1.0", b"1.1")) == []
