from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pypi_simple import PYPI_SIMPLE_ENDPOINT

from pipeline.core.errors import SourceUnreachable
from pipeline.core.net import http, timing
from pipeline.core.net.address import masked, split_address
from pipeline.core.net.http import NetClient
from pipeline.core.net.settings import (
    NetworkSettings,
    _pip_config_list,
    local_folder,
    pip_settings,
    read_settings,
    with_login,
)
from pipeline.core.net.timing import HttpLimits
from pipeline.images.fetch import inputs
from pipeline.images.fetch.index import find_file
from pipeline.images.fetch.sources import DebianMirror, Sources, debian_mirror, read_below
from tests.testbed import fault_server as faults
from tests.testbed.fault_server import FaultServer
from tests.unit.support import pin_for

SECRET = "tr0ub4dor"
ASK_PIP = _pip_config_list  # before a test puts something in its place
INDEX = "https://index.example.invalid/simple"
OTHER = "https://other.example.invalid/simple"


def test_the_environment_beats_install_and_install_beats_global() -> None:
    listing = (
        ":env:.index-url='https://env'\ndownload.index-url='https://download'\n"
        "global.index-url='https://global'\ninstall.index-url='https://install'\n"
    )
    lines = listing.splitlines()
    for best in ("env", "install", "download", "global"):
        result = pip_settings("\n".join(lines))
        assert result["index-url"] == [f"https://{best}"]
        lines = [line for line in lines if best not in line.partition("=")[2]]


def test_the_order_of_lines_does_not_matter() -> None:
    one, two = "global.cert='/a'", ":env:.cert='/b'"
    assert pip_settings(f"{one}\n{two}") == pip_settings(f"{two}\n{one}") == {"cert": ["/b"]}


def test_several_values_stay_several() -> None:
    listing = "global.extra-index-url='https://a https://b\\nhttps://c'"
    expected = ["https://a", "https://b", "https://c"]
    assert pip_settings(listing)["extra-index-url"] == expected


def test_an_empty_setting_does_not_hide_a_full_one() -> None:
    assert pip_settings(":env:.index-url=''\nglobal.index-url='https://a'") == {
        "index-url": ["https://a"]
    }


@pytest.mark.parametrize("line", ["", "nonsense", "wheel.index-url='x'", "freeze.proxy='x'", "="])
def test_what_is_not_for_installing_is_passed_over(line: str) -> None:
    assert pip_settings(line) == {}


def test_a_value_with_an_equals_sign_and_a_quote_survives() -> None:
    listing = 'global.index-url="https://u:p\'w@h/simple?a=b"'
    assert pip_settings(listing)["index-url"] == ["https://u:p'w@h/simple?a=b"]


@pytest.fixture
def real_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.core.net.settings._pip_config_list", ASK_PIP)


@pytest.mark.usefixtures("real_pip")
def test_real_pip_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(f"[global]\nindex-url = {INDEX}\nproxy = h:1\n[install]\nproxy = h:2\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", OTHER)
    result = read_settings()
    assert (result.indexes, result.proxy) == ((INDEX, OTHER), "h:2")


@pytest.mark.usefixtures("real_pip")
def test_a_python_without_pip_has_no_pip_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", INDEX)
    monkeypatch.setattr(sys, "executable", shutil.which("false") or "/bin/false")
    assert read_settings().indexes == (PYPI_SIMPLE_ENDPOINT,)


@pytest.fixture
def pip_says(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr("pipeline.core.net.settings._pip_config_list", lambda: "\n".join(lines))
    return lines


def test_nothing_configured_means_the_public_index(pip_says: list[str]) -> None:
    result = read_settings()
    assert result.indexes == (PYPI_SIMPLE_ENDPOINT,)
    assert (result.folders, result.proxy, result.mirrors) == ((), None, ())


@pytest.mark.parametrize("word", ["1", "true", "True", "yes", "on"])
def test_no_index_leaves_only_folders(pip_says: list[str], word: str) -> None:
    pip_says += [f"global.no-index='{word}'", "global.find-links='/wheels'"]
    assert read_settings() == NetworkSettings(
        indexes=(), folders=(Path("/wheels"),), ca_file=read_settings().ca_file
    )


@pytest.mark.parametrize("word", ["0", "false", "no", "off"])
def test_no_index_that_says_no_changes_nothing(pip_says: list[str], word: str) -> None:
    pip_says.append(f":env:.no-index='{word}'")
    assert read_settings().indexes == (PYPI_SIMPLE_ENDPOINT,)


def test_file_addresses_and_find_links_are_folders(pip_says: list[str]) -> None:
    pip_says += [
        "global.extra-index-url='file:///opt/a%20b/simple https://other.example.invalid/simple'",
        "global.find-links='/wheels ~/more file:///wheels'",
    ]
    result = read_settings()
    assert result.indexes == (PYPI_SIMPLE_ENDPOINT, OTHER)
    expected = (Path("/wheels"), Path("~/more").expanduser(), Path("/opt/a b/simple"))
    assert result.folders == expected


def test_uvs_environment_beats_its_files_and_pip(
    pip_says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_says.append(f"global.index-url='{OTHER}'")
    monkeypatch.setenv("UV_DEFAULT_INDEX", INDEX)
    assert read_settings().indexes == (INDEX,)


def test_uvs_user_file_is_read(
    pip_says: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "uv").mkdir()
    (tmp_path / "uv" / "uv.toml").write_text(
        f'no-index = false\n[[index]]\nurl = "{INDEX}"\ndefault = true\n[[index]]\nurl = "{OTHER}"'
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_settings().indexes == (INDEX, OTHER)


@pytest.mark.parametrize("text", ["[[index", "\x00", "index = 3 = 4"])
def test_an_unreadable_uv_file_is_passed_over(
    pip_says: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    (tmp_path / "uv").mkdir()
    (tmp_path / "uv" / "uv.toml").write_text(text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert read_settings().indexes == (PYPI_SIMPLE_ENDPOINT,)


def test_all_of_uvs_spellings(
    pip_says: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UV_INDEX", f"mine={INDEX} https://h/simple?a=b")
    monkeypatch.setenv("UV_EXTRA_INDEX_URL", "https://x https://y")
    monkeypatch.setenv("UV_FIND_LINKS", "/a,/b")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("pipeline.core.net.settings._SYSTEM_UV", tmp_path / "system.toml")
    (tmp_path / "uv").mkdir()
    (tmp_path / "uv" / "uv.toml").write_text(
        'index-url = "https://d"\nextra-index-url = ["https://z"]\nfind-links = ["/c"]\n'
    )
    (tmp_path / "system.toml").write_text('[pip]\nindex-url = "https://e"\n')
    result = read_settings()
    extra = (INDEX, "https://h/simple?a=b", "https://x", "https://y", "https://z")
    assert result.indexes == ("https://d", *extra)
    assert result.folders == (Path("/a"), Path("/b"), Path("/c"))
    (tmp_path / "system.toml").write_text("[pip]\nno-index = true\n")
    assert read_settings().indexes == ()


def test_mirrors_come_from_the_command_then_the_environment(
    pip_says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM120_MIRRORS", "/b https://c")
    assert read_settings(("/a",)).mirrors == ("/a", "/b", "https://c")


def test_pips_certificate_wins_if_it_exists(
    pip_says: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ours, theirs = tmp_path / "ours.pem", tmp_path / "theirs.pem"
    theirs.write_text("")
    monkeypatch.setenv("SSL_CERT_FILE", str(theirs))
    pip_says.append(f"global.cert='{ours}'")
    assert read_settings().ca_file == str(theirs)
    ours.write_text("")
    assert read_settings().ca_file == str(ours)


def proxy_of(settings: NetworkSettings) -> str:
    proxy = NetClient(settings)._connections._proxies.of(split_address(INDEX))
    return proxy.url if proxy else ""


def test_the_configured_proxy_wins_over_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://env:1")
    monkeypatch.delenv("no_proxy")
    assert proxy_of(NetworkSettings(indexes=(), proxy="http://ours:2")) == "http://ours:2"
    assert proxy_of(NetworkSettings(indexes=())) == "http://env:1"


def test_the_configured_certificate_is_the_one_that_judges(tmp_path: Path) -> None:
    client = NetClient(
        NetworkSettings(indexes=(), ca_file=str(tmp_path / "ours.pem")), first_wait_s=0
    )
    with pytest.raises(SourceUnreachable, match=r"ours\.pem") as caught:
        client.read("https://127.0.0.1:9/x", 9)
    assert "SSL_CERT_FILE" in caught.value.hint


def test_two_clients_never_share_a_proxy() -> None:
    asked = [proxy_of(NetworkSettings(indexes=(), proxy=f"http://p:{n}")) for n in range(1, 20)]
    assert asked == [f"http://p:{n}" for n in range(1, 20)]


@pytest.mark.parametrize("proxy", ["http://[", "socks5://p:1", "http://me:tr0ub4dor@p:99999"])
def test_a_proxy_that_is_none_is_named_with_a_hint(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("https_proxy", proxy)
    for settings in (NetworkSettings(indexes=(), proxy=proxy), NetworkSettings(indexes=())):
        with pytest.raises(SourceUnreachable, match="the proxy") as caught:
            NetClient(settings, first_wait_s=0).read(f"{INDEX}/x", 9)
        assert "HTTPS_PROXY" in caught.value.hint
        assert SECRET not in str(caught.value)


def test_requests_really_go_through_the_proxy(server: FaultServer) -> None:
    server.files["http://far.example.invalid/x"] = b"through the proxy"
    client = NetClient(NetworkSettings(indexes=(), proxy=server.url))
    assert client.read("http://far.example.invalid/x", 99) == b"through the proxy"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"https://me:{SECRET}@h/simple", "https://***@h/simple"),
        (f"https://{SECRET}@h:8080/simple", "https://***@h:8080/simple"),
        (f"https://me:{SECRET}@ss@h/simple", "https://***@h/simple"),
        (f"me:{SECRET}@proxy:3128", "***@proxy:3128"),
        (f"404 for url: http://me:{SECRET}@h/x and more", "404 for url: http://***@h/x and more"),
        ("https://h/a@b", "https://h/a@b"),
        ("https://h/simple", "https://h/simple"),
        ("/folder/with@sign", "/folder/with@sign"),
    ],
)
def test_logins_are_masked_and_nothing_else(text: str, shown: str) -> None:
    assert masked(text) == shown


@given(
    st.text("abcXYZ019.-_~%", min_size=1), st.text("abcXYZ019.-_~%:!@", min_size=8), st.text("q/")
)
def test_no_password_survives_masking(user: str, password: str, path: str) -> None:
    assert password not in masked(f"see https://{user}:{password}@host/{path}")


@pytest.fixture
def private(server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """An index behind a password; its address carries the login."""
    monkeypatch.setattr(timing, "LONGEST_WAIT_S", 0.001)
    server.login = f"me:{SECRET}"
    return server.index.replace("://", f"://me:{SECRET}@")


@pytest.mark.parametrize("absolute", [True, False])
def test_the_indexes_login_is_used_for_its_files(
    server: FaultServer, private: str, absolute: bool
) -> None:
    server.absolute_links = absolute
    data = b"behind a password"
    pin = pin_for(data)
    server.add(pin.file, data)
    client = NetClient(NetworkSettings(indexes=(private,)), first_wait_s=0.001)
    places = [p for found in Sources(client).finders(pin, offline=False) for p in found]
    assert client.read(str(places[0]), 99) == data


def test_a_login_is_not_given_to_another_server() -> None:
    index = f"https://me:{SECRET}@h/simple"
    for url in ("https://files.h/x", "http://h/x", "https://h:444/x", "https://you@h/x"):
        assert with_login(url, index) == url
    assert with_login("https://h/x", "https://h/simple") == "https://h/x"


@pytest.mark.parametrize(
    "fault",
    [
        faults.status(401),
        faults.status(403),
        faults.status(500),
        faults.status(302, Location="ftp://x"),
        faults.instead(b"?", "image/png"),
        faults.instead(b"{", faults.JSON_PAGE),
        faults.claiming_length(99),
    ],
)
def test_no_error_about_an_index_shows_its_password(
    server: FaultServer, private: str, fault: faults.Fault
) -> None:
    server.fail("/simple/thing/", fault, 9)
    client = NetClient(NetworkSettings(indexes=(private,)), first_wait_s=0.001)
    with pytest.raises(SourceUnreachable) as caught:
        find_file(client, private, "thing", "thing-1-py3-none-any.whl")
    assert SECRET not in str(caught.value)
    assert "***@127.0.0.1" in str(caught.value)


@pytest.mark.parametrize(
    "fault",
    [
        faults.status(401),
        faults.status(500),
        faults.cut(3),
        faults.status(302, Location=f"ftp://me:{SECRET}@x"),
        faults.status(302, Location=f"http://me:{SECRET}@no.example.invalid/"),
        faults.instead(b"?"),
    ],
)
def test_no_error_about_a_file_shows_a_password(
    server: FaultServer, private: str, fault: faults.Fault, tmp_path: Path
) -> None:
    server.fail("/simple/x", fault, 9)
    client = NetClient(NetworkSettings(indexes=()), first_wait_s=0.001)
    with pytest.raises(Exception, match=r"\*\*\*@") as caught:
        http.download_file(
            client,
            f"{private}x",
            tmp_path / "partial",
            sha256="0" * 64,
            size_bytes=2,
            bar=_NoBar(),
        )
    assert SECRET not in str(caught.value)


class _NoBar:
    def advance(self, n_bytes: int) -> None:
        return


def test_no_error_about_a_proxy_shows_its_password() -> None:
    client = NetClient(
        NetworkSettings(indexes=(), proxy=f"http://me:{SECRET}@127.0.0.1:9"), first_wait_s=0
    )
    with pytest.raises(SourceUnreachable) as caught:
        client.read("http://far.example.invalid/x", 99)
    assert SECRET not in str(caught.value)


def test_uv_gets_the_same_settings_and_no_password_is_an_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = NetworkSettings(
        indexes=(INDEX, OTHER),
        folders=(tmp_path, tmp_path / "gone"),
        ca_file="/ca.pem",
        proxy="http://p:1",
    )
    monkeypatch.setattr(inputs, "read_settings", lambda: settings)
    ask = inputs.make_transport()
    assert ask.index_args == []
    assert ask.index_env == {
        "UV_DEFAULT_INDEX": INDEX,
        "UV_INDEX": OTHER,
        "UV_FIND_LINKS": str(tmp_path),
        "SSL_CERT_FILE": "/ca.pem",
        "HTTP_PROXY": "http://p:1",
        "HTTPS_PROXY": "http://p:1",
    }
    settings = NetworkSettings(indexes=(PYPI_SIMPLE_ENDPOINT,))
    assert inputs.make_transport().index_env == {}


def test_a_place_is_a_folder_or_an_address() -> None:
    assert local_folder("file:///a%20b") == Path("/a b")
    assert local_folder("a/b") == Path("a/b")
    assert local_folder("file://localhost/a") == local_folder("file:/a") == Path("/a")
    assert local_folder("http://[broken") is None
    assert local_folder("file://[") == Path("/")


def test_the_debian_mirror_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120_DEBIAN_MIRROR", "http://a http://b")
    monkeypatch.setenv("SM120_DEBIAN_SECURITY_MIRROR", "http://s")
    assert debian_mirror() == DebianMirror(("http://a", "http://b"), ("http://s",))


def test_debians_indexes_come_from_the_first_mirror_that_works(
    server: FaultServer, tmp_path: Path
) -> None:
    server.files["/debian/dists/x"] = b"index"
    client = NetClient(NetworkSettings(indexes=()), first_wait_s=0.001)
    bases = [tmp_path.as_uri(), "http://127.0.0.1:9", f"{server.url}/debian"]
    assert read_below(client, bases, "dists/x", 99) == b"index"
    (tmp_path / "dists").mkdir()
    (tmp_path / "dists" / "x").write_bytes(b"nearer")
    assert read_below(client, bases, "dists/x", 99) == b"nearer"


def test_no_mirror_that_works_names_them_all(server: FaultServer, tmp_path: Path) -> None:
    client = NetClient(NetworkSettings(indexes=()), first_wait_s=0.001)
    with pytest.raises(SourceUnreachable, match=r"No such file.*answers 404"):
        read_below(client, [tmp_path.as_uri(), server.url], "dists/x", 99)
    with pytest.raises(Exception, match="no mirror is known"):
        read_below(client, [], "dists/x", 99)


@pytest.mark.parametrize(
    ("fault", "silence_s"),
    [(faults.cut(3), 20), (faults.status(500), 20), (faults.stall(3), 1)],
)
def test_a_small_file_is_read_again_after_a_passing_fault(
    server: FaultServer, fault: faults.Fault, silence_s: float
) -> None:
    url = server.add("x", b"whole")
    server.fail_file("x", fault, 2)
    client = NetClient(
        NetworkSettings(indexes=()), first_wait_s=0.001, limits=HttpLimits(silence_s=silence_s)
    )
    assert client.read(url, 99) == b"whole"


def test_a_file_larger_than_it_may_be_is_not_read(server: FaultServer, tmp_path: Path) -> None:
    client = NetClient(NetworkSettings(indexes=()), first_wait_s=0.001)
    url = server.add("x", b"12345")
    (tmp_path / "x").write_bytes(b"12345")
    with pytest.raises(SourceUnreachable, match="larger than 4 bytes"):
        client.read(url, 4)
    with pytest.raises(SourceUnreachable, match="larger than 4 bytes"):
        read_below(client, [tmp_path.as_uri()], "x", 4)


def test_a_size_is_asked_without_the_bytes(server: FaultServer) -> None:
    client = NetClient(NetworkSettings(indexes=()), first_wait_s=0.001)
    assert client.size_of(server.add("x", b"12345")) == 5
    assert server.sent_bytes == {}
