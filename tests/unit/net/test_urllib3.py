"""What `pipeline.core.net` uses of urllib3 that is private: a new version may change it."""

from __future__ import annotations

import inspect
import tomllib
from importlib.metadata import version

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from tests.unit.support import ROOT


def test_a_new_major_version_is_not_installed_before_it_was_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (bound,) = [text for text in project["dependencies"] if text.startswith("urllib3")]
    assert bound == "urllib3>=2.3,<3"
    assert version("urllib3").split(".")[0] == "2"


def test_connections_are_opened_by_the_method_that_we_override() -> None:
    for kind in (HTTPConnection, HTTPSConnection):
        assert "self._new_conn()" in inspect.getsource(kind.connect)


def test_an_answer_has_that_of_the_standard_library_below_it() -> None:
    assert urllib3.HTTPResponse(original_response=None)._original_response is None
    assert "_original_response" not in vars(urllib3.BaseHTTPResponse)
