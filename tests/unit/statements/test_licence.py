"""Licences in SPDX's words only where that is certain."""

from __future__ import annotations

import pytest

from pipeline.evidence.statements.licence import deb_licence, wheel_licence


def metadata(*lines: str) -> bytes:
    return "\n".join(["Metadata-Version: 2.4", "Name: x", "Version: 1", *lines, ""]).encode()


@pytest.mark.parametrize(
    ("lines", "expression"),
    [
        (["License-Expression: mit"], "MIT"),
        (["License-Expression: MIT OR (apache-2.0 AND BSD-3-Clause)"], None),
        (["License: Apache-2.0"], "Apache-2.0"),
        (["License: Apache License 2.0"], "Apache-2.0"),
        (["License: BSD 3-Clause"], "BSD-3-Clause"),
        (["License: MIT License", "        ", "        Copyright (c) me"], "MIT"),
        (["License: Apache License", "            Version 2.0, January 2004"], "Apache-2.0"),
        (["Classifier: License :: OSI Approved :: MIT License"], "MIT"),
        (
            ["License: see LICENSE", "Classifier: License :: OSI Approved :: MIT License"],
            "MIT",
        ),
        (
            [
                "Classifier: License :: OSI Approved :: MIT License",
                "Classifier: License :: OSI Approved :: ISC License (ISCL)",
            ],
            "ISC AND MIT",
        ),
    ],
)
def test_a_certain_licence_is_an_expression(lines: list[str], expression: str | None) -> None:
    licence = wheel_licence(metadata(*lines))
    assert licence.expression == (expression or "MIT OR (Apache-2.0 AND BSD-3-Clause)")
    field = "classifiers" if "Classifier" in lines[-1] else lines[0].partition(":")[0]
    assert licence.reason.startswith(f"METADATA {field}")


@pytest.mark.parametrize(
    ("lines", "name", "reason"),
    [
        (["License-Expression: my own words"], "my own words", "not SPDX's words"),
        (["License: NVIDIA Proprietary Software"], "NVIDIA Proprietary Software", "free text"),
        (["License: Copyright (c) me", "        All rights"], "Copyright (c) me", "free text"),
        (["License: Apache License", "        of some kind"], "Apache License", "free text"),
        (["License: " + "x" * 500], "x" * 120 + "…", "free text"),
        (["Classifier: License :: OSI Approved :: BSD License"], "BSD License", "not exact"),
        (["Classifier: License :: OSI Approved"], None, "names no licence"),
        ([], None, "names no licence"),
    ],
)
def test_an_uncertain_licence_is_a_name_or_a_reason(
    lines: list[str], name: str | None, reason: str
) -> None:
    licence = wheel_licence(metadata(*lines))
    assert licence.expression is None
    assert licence.name == name
    assert reason in licence.reason


HEAD = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\n"


@pytest.mark.parametrize(
    ("lines", "expression"),
    [
        ("License: GPL-2+\n", "GPL-2.0-or-later"),
        ("License: LGPL-2.1\n", "LGPL-2.1-only"),
        ("License: GPL-3.0+\n", "GPL-3.0-or-later"),
        ("License: Expat\n\nLicense: GPL-2+\n text\n", "GPL-2.0-or-later AND MIT"),
        ("License: GPL-2+ or Expat\n\nLicense: Zlib\n", "(GPL-2.0-or-later OR MIT) AND Zlib"),
        ("License: BSD-3-clause and ISC\n", "BSD-3-Clause AND ISC"),
    ],
)
def test_debians_names_become_SPDXs_where_they_can(lines: str, expression: str) -> None:
    assert deb_licence((HEAD + lines).encode()).expression == expression


@pytest.mark.parametrize(
    ("text", "name", "reason"),
    [
        (HEAD + "License: public-domain\n", "public-domain", "not all of them SPDX's"),
        (HEAD + "License: GPL-2+ with Bison exception\n", "GPL-2+ with Bison exception", "names"),
        (HEAD + "Files: *\n", None, "names no licence"),
        ("This package is free.\n", None, "not machine-readable"),
        ("", None, "not machine-readable"),
    ],
)
def test_what_debian_does_not_say_exactly_is_not_asserted(
    text: str, name: str | None, reason: str
) -> None:
    licence = deb_licence(text.encode())
    assert licence.expression is None
    assert licence.name == name
    assert reason in licence.reason
