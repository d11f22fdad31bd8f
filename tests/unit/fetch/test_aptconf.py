from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import MirrorUnknown
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import NetworkSettings
from pipeline.images.fetch.sources import DebianMirror, Sources, debian_mirror
from pipeline.images.lock.model import DebPin

MAIN = "http://mirror.example.invalid/debian"
SECURITY = "http://mirror.example.invalid/debian-security"
BOTH = DebianMirror((MAIN,), (SECURITY,))


@pytest.fixture(autouse=True)
def no_named_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SM120_DEBIAN_MIRROR", raising=False)


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_deb822_file_gives_both_archives(tmp_path: Path) -> None:
    write(
        tmp_path,
        "etc/apt/sources.list.d/debian.sources",
        f"Types: deb deb-src\n# a comment\nURIs: {MAIN}/\nSuites: bookworm bookworm-updates\n"
        "Components: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n\n"
        f"Types: deb\nURIs: {SECURITY}\nSuites: bookworm-security\nComponents: main\n",
    )
    assert debian_mirror(tmp_path) == BOTH


def test_a_one_line_file_gives_both_archives(tmp_path: Path) -> None:
    write(
        tmp_path,
        "etc/apt/sources.list",
        "# deb http://old.example.invalid/debian bookworm main\n"
        "deb cdrom:[Debian GNU/Linux 12]/ bookworm main\n"
        f"deb-src http://src.example.invalid/debian bookworm main\n"
        f"deb [arch=amd64 signed-by=/x/debian-archive-keyring.gpg] {MAIN} bookworm main # ours\n"
        f"deb {SECURITY} bookworm-security main contrib\n",
    )
    assert debian_mirror(tmp_path) == BOTH


def test_files_are_read_in_order_and_an_address_counts_once(tmp_path: Path) -> None:
    write(tmp_path, "etc/apt/sources.list", f"deb {MAIN} bookworm main\n")
    other = "https://other.example.invalid/debian"
    write(
        tmp_path,
        "etc/apt/sources.list.d/a.list",
        f"deb {MAIN}/ stable main\ndeb {other} trixie main\n",
    )
    assert debian_mirror(tmp_path).main == (MAIN, other)


def test_a_mirror_list_on_disk_is_followed(tmp_path: Path) -> None:
    write(tmp_path, "etc/apt/mirrors/debian.list", f"{MAIN}\tpriority:1\n# no\n{MAIN}2\n")
    write(
        tmp_path,
        "etc/apt/sources.list.d/debian.sources",
        "Types: deb\nURIs: mirror+file:///etc/apt/mirrors/debian.list\n"
        "Suites: bookworm\nComponents: main\n",
    )
    assert debian_mirror(tmp_path).main == (MAIN, MAIN + "2")


def test_a_locked_path_says_which_archive_it_lies_in() -> None:
    sources = Sources(NetClient(NetworkSettings(indexes=())), lambda: BOTH)
    for path, archive in (("pool/main/a.deb", MAIN), ("pool/updates/main/a.deb", SECURITY)):
        pin = DebPin(name="a", version="1", path=path, size_bytes=1, sha256="0" * 64)
        found = [place for places in sources.finders(pin, offline=False) for place in places]
        assert found == [f"{archive}/{path}"]


@pytest.mark.parametrize(
    "line",
    [
        "deb https://vendor.example.invalid/node_20.x nodistro main",
        "deb http://archive.example.invalid/ubuntu noble main",
        "deb http://debian.example.invalid/debian noble main",
        "deb https://debian.example.invalid/cloud cloud-sdk-bookworm main",
        "deb https://download.example.invalid/linux/debian bookworm stable",
        "deb [signed-by=/k/vendor.gpg] https://v.example.invalid/debian bookworm main",
        "deb https://vendor.example.invalid/chrome stable main",
        "deb https://pg.example.invalid/debian bookworm-pgdg main",
        "deb-src http://mirror.example.invalid/debian bookworm main",
        "#deb http://mirror.example.invalid/debian bookworm main",
        "deb cdrom:[Debian GNU/Linux]/debian bookworm main",
        "deb tor+http://mirror.example.invalid/debian bookworm main",
        "deb mirror+file:/etc/apt/none.list bookworm main",
        "deb http://mirror.example.invalid/debian",
        "debian",
    ],
)
def test_what_does_not_serve_debian_is_passed_over(tmp_path: Path, line: str) -> None:
    write(tmp_path, "etc/apt/sources.list", line + "\n")
    with pytest.raises(MirrorUnknown) as caught:
        debian_mirror(tmp_path)
    assert "SM120_DEBIAN_MIRROR" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "Types: deb\nURIs: {0}\nSuites: bookworm\nComponents: main\nEnabled: no\n",
        "Types: deb-src\nURIs: {0}\nSuites: bookworm\nComponents: main\n",
        "Types: deb\nURIs: {0}\nSuites: bookworm\nComponents: contrib\n",
        "Types: deb\nURIs: {0}\nSuites: bookworm\nComponents: main\nSigned-By: /k/vendor.asc\n",
        "Types: deb\nURIs: {0}\nSuites: sid\nComponents: main\nSigned-By:\n -----BEGIN\n key\n",
        "not deb822 at all\n",
    ],
)
def test_a_deb822_source_that_is_off_or_not_debian_is_passed_over(
    tmp_path: Path, text: str
) -> None:
    write(tmp_path, "etc/apt/sources.list.d/debian.sources", text.format(MAIN))
    with pytest.raises(MirrorUnknown):
        debian_mirror(tmp_path)


def test_a_disabled_file_name_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, "etc/apt/sources.list.d/debian.list.save", f"deb {MAIN} bookworm main\n")
    with pytest.raises(MirrorUnknown):
        debian_mirror(tmp_path)


def test_python_apts_template_answers_on_an_ubuntu_host(tmp_path: Path) -> None:
    write(
        tmp_path, "etc/apt/sources.list", "deb http://archive.example.invalid/ubuntu noble main\n"
    )
    write(
        tmp_path,
        "usr/share/python-apt/templates/Debian.info",
        f"Suite: {{series}}\nBaseURI: {MAIN}/\nComponent: main\nComponent: contrib\n\n"
        f"Suite: {{series}}-security\nBaseURI: {SECURITY}/\n\n"
        "Suite: {series}-updates\nBaseURI: http://no.example.invalid/\n",
    )
    assert debian_mirror(tmp_path) == BOTH


def test_the_hosts_own_mirror_comes_before_any_template(tmp_path: Path) -> None:
    write(tmp_path, "etc/apt/sources.list", f"deb {MAIN} bookworm main\n")
    write(
        tmp_path,
        "usr/share/python-apt/templates/Debian.info",
        "Suite: {series}-security\nBaseURI: http://public.example.invalid/debian\n",
    )
    assert debian_mirror(tmp_path) == DebianMirror((MAIN,), ())
