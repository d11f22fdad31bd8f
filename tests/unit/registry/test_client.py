from __future__ import annotations

import base64
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.oci.reference import parse_reference
from pipeline.artifacts.registry.access import Access
from pipeline.artifacts.registry.auth import Scope, read_challenges
from pipeline.artifacts.registry.client import RegistryClient, RegistryRequest
from pipeline.artifacts.registry.repository import Repository
from pipeline.core.errors import (
    DeleteDisabled,
    Interrupted,
    NotInRegistry,
    PipelineError,
    RegistryBroken,
    RegistryRefused,
    RegistryUnreachable,
)
from pipeline.core.net.failures import Lost
from pipeline.core.net.timing import retry_after_s
from tests.testbed.oci_door import (
    Door,
    Fault,
    cut_answer,
    drop,
    oci_door,
    status,
    with_body,
    with_headers,
)
from tests.testbed.tiny_registry import TinyRegistry
from tests.unit.registry.support import NAME, keep_login, push, put_image, repository_at

MANIFESTS = "/manifests/"


@pytest.fixture
def login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, door: Door, tiny: TinyRegistry) -> str:
    """The registry wants a login, and this machine has it."""
    tiny.login = "ann:secret"
    auth = base64.b64encode(b"ann:secret").decode()
    keep_login(monkeypatch, tmp_path / "docker", {"auths": {door.host_port: {"auth": auth}}})
    return f"Basic {auth}"


def test_a_registry_without_passwords_is_never_sent_one(
    login: str, door: Door, tiny: TinyRegistry
) -> None:
    tiny.login = ""
    push(repository_at(door), b"data")
    assert all("authorization" not in a.headers for a in door.asked)


def test_basic_login_is_sent_after_it_was_asked_for_and_then_at_once(
    login: str, door: Door
) -> None:
    repository = repository_at(door)
    push(repository, b"data")
    push(repository, b"more data")
    refused = [a for a in door.asked if "authorization" not in a.headers]
    # the probe for plain http, and one for each scope
    assert len(refused) <= 3
    assert {a.headers.get("authorization") for a in door.asked} == {None, login}


def test_a_bearer_token_is_fetched_with_the_login_and_sent_only_to_the_registry(
    login: str, door: Door, tiny: TinyRegistry
) -> None:
    tiny.token = "tok-1"
    with oci_door(tiny) as service:
        tiny.realm = f"{service.url}/token"
        push(repository_at(door), b"data")
        asked = [a.headers.get("authorization") for a in service.asked]
        wanted = [a.query for a in service.asked]
    assert set(asked) == {login}
    assert any("scope=repository%3Ateam%2Fapp%3Apull%2Cpush" in q for q in wanted)
    assert all("service=tiny" in q for q in wanted)
    assert {a.headers.get("authorization") for a in door.asked} == {None, "Bearer tok-1"}


def test_an_identity_token_is_exchanged_for_a_bearer_token(
    login: str, door: Door, tiny: TinyRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny.token, tiny.realm = "tok-2", f"{door.url}/token"
    entry = {door.host_port: {"identitytoken": tiny.login}}
    keep_login(monkeypatch, tmp_path / "docker", {"auths": entry})
    push(repository_at(door), b"data")
    assert door.count("POST", "/token") >= 1


def test_a_token_that_ran_out_is_fetched_again(login: str, door: Door, tiny: TinyRegistry) -> None:
    tiny.token, tiny.realm = "old", f"{door.url}/token"
    repository = repository_at(door)
    push(repository, b"data")
    tiny.token = "new"
    push(repository, b"more data")
    assert door.asked[-1].headers["authorization"] == "Bearer new"


def test_a_registry_that_refuses_for_ever_ends_after_two_tries(
    login: str, door: Door, tiny: TinyRegistry
) -> None:
    tiny.login = "someone:else"
    with pytest.raises(RegistryRefused, match="401"):
        repository_at(door).tags()
    assert door.count("GET", "tags") == 2


def test_a_token_service_that_refuses_is_reported(
    login: str, door: Door, tiny: TinyRegistry
) -> None:
    tiny.realm, tiny.login = f"{door.url}/token", "someone:else"
    with pytest.raises(RegistryRefused, match="token service"):
        repository_at(door).tags()


def test_no_login_where_one_is_wanted_is_a_refusal(door: Door, tiny: TinyRegistry) -> None:
    tiny.login = "ann:secret"
    with pytest.raises(RegistryRefused, match="no"):
        repository_at(door).tags()


@pytest.mark.parametrize("header", ["", "Negotiate", "Digest realm=x", 'Bearer service="x"'])
def test_a_challenge_without_a_way_in_is_an_error(door: Door, header: str) -> None:
    repository = repository_at(door)
    door.fail("GET", "tags", status(401, WWW_Authenticate=header), times=3)
    scheme = header.split(" ")[0].lower() or "nothing"
    with pytest.raises(RegistryBroken, match=f"asks for {scheme}, which is not supported"):
        repository.tags()


def test_a_forbidden_repository_is_a_refusal_without_a_second_try(door: Door) -> None:
    repository = repository_at(door)
    door.fail("GET", "tags", status(403))
    with pytest.raises(RegistryRefused, match="403"):
        repository.tags()
    assert door.count("GET", "tags") == 1


@pytest.mark.parametrize("code", [408, 429, 500, 502, 503, 504])
def test_a_bad_moment_passes(door: Door, tiny: TinyRegistry, code: int) -> None:
    put_image(tiny, "v1", b"layer")
    repository = repository_at(door)
    door.fail("GET", "tags", status(code, Retry_After="0"), times=4)
    assert repository.tags() == ["v1"]


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_bad_day_is_an_error_after_five_tries(door: Door, code: int) -> None:
    repository = repository_at(door)
    door.fail("GET", "tags", status(code, Retry_After="0"), times=9)
    with pytest.raises(RegistryUnreachable, match=str(code)):
        repository.tags()
    assert door.count("GET", "tags") == 5


def test_retry_after_is_obeyed(door: Door, tiny: TinyRegistry) -> None:
    put_image(tiny, "v1", b"layer")
    repository = repository_at(door)
    door.fail("GET", "tags", status(429, Retry_After="1"))
    start = time.monotonic()
    repository.tags()
    assert time.monotonic() - start >= 1


def test_a_dropped_connection_is_tried_again(door: Door, tiny: TinyRegistry) -> None:
    put_image(tiny, "v1", b"layer")
    repository = repository_at(door)
    door.fail("GET", "tags", drop(), times=3)
    assert repository.tags() == ["v1"]


def test_a_manifest_that_breaks_off_is_read_again(door: Door, tiny: TinyRegistry) -> None:
    document = put_image(tiny, "v1", b"layer")
    repository = repository_at(door)
    door.fail("GET", MANIFESTS, cut_answer(20), times=2)
    assert repository.manifest("v1").data == document.data


def test_a_manifest_of_other_bytes_is_refused(door: Door, tiny: TinyRegistry) -> None:
    one, two = put_image(tiny, "v1", b"layer"), put_image(tiny, "v2", b"other")
    repository = repository_at(door)
    door.fail("GET", MANIFESTS, with_body(two.data))
    with pytest.raises(RegistryBroken, match="received"):
        repository.manifest(one.digest)


def test_a_digest_answered_wrongly_is_refused(door: Door, tiny: TinyRegistry) -> None:
    claimed = "sha256:" + "0" * 64
    one = put_image(tiny, "v1", b"layer")
    repository = repository_at(door)
    for name in ("v1", one.digest):
        door.fail("GET", MANIFESTS, with_headers(Docker_Content_Digest=claimed))
        with pytest.raises(RegistryBroken):
            repository.manifest(name)


def test_a_truncated_manifest_is_no_manifest(door: Door, tiny: TinyRegistry) -> None:
    one = put_image(tiny, "v1", b"layer")
    repository = repository_at(door)
    door.fail("GET", MANIFESTS, with_body(one.data[:-3]))
    with pytest.raises(RegistryBroken):
        repository.manifest("v1")


def test_an_endless_manifest_is_given_up(door: Door, tiny: TinyRegistry) -> None:
    put_image(tiny, "v1", b"layer")
    repository = repository_at(door)
    door.fail("GET", MANIFESTS, with_body(b" " * (5 << 20)))
    with pytest.raises(RegistryBroken, match="larger"):
        repository.manifest("v1")


def test_tags_come_page_by_page(door: Door, tiny: TinyRegistry) -> None:
    for number in range(7):
        put_image(tiny, f"v{number}", b"layer")
    tiny.page_size = 3
    assert repository_at(door).tags() == [f"v{n}" for n in range(7)]


def test_a_page_on_another_server_is_looked_for_on_this_one(door: Door, tiny: TinyRegistry) -> None:
    put_image(tiny, "v1", b"layer")
    repository = repository_at(door)
    link = f'<http://127.0.0.1:9/v2/{NAME}/tags/list?last=v1>; rel="next"'
    door.fail("GET", "tags", with_headers(Link=link))
    assert repository.tags() == ["v1"]
    assert door.count("GET", "tags") == 2


def test_a_list_of_tags_that_does_not_end_is_given_up(
    door: Door, tiny: TinyRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_image(tiny, "v1", b"layer")
    monkeypatch.setattr("pipeline.artifacts.registry.repository._MOST_PAGES", 5)
    repository = repository_at(door)
    link = f'</v2/{NAME}/tags/list>; rel="next"'
    door.fail("GET", "tags", with_headers(Link=link), times=9)
    with pytest.raises(RegistryBroken, match="does not end"):
        repository.tags()


def test_more_tags_than_any_repository_has_are_not_kept_in_memory(
    door: Door, tiny: TinyRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(7):
        put_image(tiny, f"v{number}", b"layer")
    monkeypatch.setattr("pipeline.artifacts.registry.repository._MOST_TAGS", 6)
    with pytest.raises(RegistryBroken, match="lists more than 6 tags"):
        repository_at(door).tags()


def test_what_is_not_there_is_reported(repository: Repository) -> None:
    with pytest.raises(NotInRegistry):
        repository.tags()
    with pytest.raises(NotInRegistry):
        repository.manifest("v1")


def test_a_manifest_is_deleted_and_one_that_is_gone_is_no_error(door: Door) -> None:
    repository, digest = repository_at(door), "sha256:" + "1" * 64
    for code in (202, 200, 204, 404):
        door.fail("DELETE", digest, status(code))
        repository.delete_manifest(digest)
    assert door.count("DELETE", digest) == 4


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (status(405), DeleteDisabled),
        (status(400, b'{"errors": [{"code": "UNSUPPORTED"}]}'), DeleteDisabled),
        (status(403), RegistryRefused),
        (status(409), RegistryBroken),
    ],
)
def test_a_registry_that_deletes_nothing_says_so(
    door: Door, fault: Fault, error: type[PipelineError]
) -> None:
    door.fail("DELETE", "manifests", fault)
    with pytest.raises(error):
        repository_at(door).delete_manifest("sha256:" + "1" * 64)


def test_a_redirect_to_another_server_takes_no_login_along(
    login: str, door: Door, tiny: TinyRegistry
) -> None:
    document = put_image(tiny, "v1", b"layer")
    repository = repository_at(door)
    with oci_door(TinyRegistry()) as other:
        other.backend = TinyRegistry(manifests=tiny.manifests)
        there = f"{other.url}/v2/{NAME}/manifests/{document.digest}"
        door.fail("GET", MANIFESTS, status(307, Location=there))
        assert repository.manifest(document.digest).data == document.data
        assert [a.headers.get("authorization") for a in other.asked] == [None]


def test_a_redirect_that_asks_for_a_login_gets_none(
    login: str, door: Door, tiny: TinyRegistry
) -> None:
    repository = repository_at(door)
    with oci_door(TinyRegistry(login="ann:secret")) as other:
        door.fail("GET", "tags", status(302, Location=f"{other.url}/v2/{NAME}/tags/list"))
        with pytest.raises(RegistryRefused):
            repository.tags()
        assert [a.headers.get("authorization") for a in other.asked] == [None]


def test_redirects_that_do_not_end_are_given_up(door: Door) -> None:
    repository = repository_at(door)
    door.fail("GET", "tags", status(302, Location=f"/v2/{NAME}/tags/list"), times=20)
    with pytest.raises(RegistryBroken, match="302"):
        repository.tags()
    assert door.count("GET", "tags") == 6


@pytest.mark.parametrize(
    "place",
    [
        "ftp://127.0.0.1/x",
        "file:///etc/passwd",
        "http://a:b@127.0.0.1/",
        "http://x:99999999/",
    ],
)
def test_a_redirect_to_what_is_no_address_is_refused(door: Door, place: str) -> None:
    repository = repository_at(door)
    door.fail("GET", "tags", status(302, Location=place))
    with pytest.raises(RegistryBroken, match="not a valid address"):
        repository.tags()


def test_from_https_nobody_leads_us_to_http(monkeypatch: pytest.MonkeyPatch) -> None:
    client = RegistryClient(parse_reference("reg.example/app"))
    assert client.base == "https://reg.example"
    with pytest.raises(RegistryBroken, match="from https"):
        client.once(RegistryRequest("GET", "http://other.example/x", Scope()))
    asked: list[str] = []

    def send(method: str, url: str, *_: object) -> Any:
        asked.append(url)
        return SimpleNamespace(status=200)

    monkeypatch.setattr(client, "_send", send)
    client.once(RegistryRequest("GET", "http://reg.example/v2/x?y=1", Scope()))
    assert asked == ["https://reg.example/v2/x?y=1"]


def test_a_registry_elsewhere_is_spoken_to_in_http_only_when_asked() -> None:
    here = parse_reference("10.1.2.3:5000/app")
    assert RegistryClient(here).base == "https://10.1.2.3:5000"
    assert RegistryClient(here, Access(insecure_http=True)).base == "http://10.1.2.3:5000"


def test_a_registrys_message_cannot_steer_a_terminal(door: Door) -> None:
    repository = repository_at(door)
    body = b'{"errors":[{"code":"X","message":"\\u001b[2Jgone\\n\\r"}]}'
    door.fail("GET", "tags", status(418, body))
    with pytest.raises(RegistryBroken) as caught:
        repository.tags()
    assert "gone" in str(caught.value)
    assert str(caught.value).isprintable()


def test_an_address_is_shown_without_its_query(door: Door) -> None:
    repository = repository_at(door)
    door.fail("POST", "uploads", status(307, Location="/v2/x/uploads/?_state=secret"))
    with pytest.raises(Exception, match="uploads") as caught:
        push(repository, b"data")
    assert "secret" not in str(caught.value)


def test_a_server_that_is_not_there_is_unreachable(door: Door) -> None:
    repository = repository_at(door)
    repository.client.base = "http://127.0.0.1:9"
    with pytest.raises(RegistryUnreachable):
        repository.tags()


def test_a_stopped_client_stops_at_once(door: Door) -> None:
    repository = repository_at(door)
    repository.client.hang_up()
    with pytest.raises((Interrupted, RegistryUnreachable)):
        repository.tags()


@pytest.mark.parametrize(
    ("header", "want"),
    [
        ('Basic realm="x"', [("basic", {"realm": "x"})]),
        (
            'Bearer realm="https://a/t",service="s",scope="repository:a:pull,push"',
            [
                (
                    "bearer",
                    {"realm": "https://a/t", "service": "s", "scope": "repository:a:pull,push"},
                )
            ],
        ),
        (
            'Bearer realm="a\\"b", Basic realm=c',
            [("bearer", {"realm": 'a"b'}), ("basic", {"realm": "c"})],
        ),
        ("Negotiate", [("negotiate", {})]),
        ("", []),
        ('="x"', []),
    ],
)
def test_challenges_are_read_as_servers_write_them(
    header: str, want: list[tuple[str, dict[str, str]]]
) -> None:
    assert [(c.scheme, c.parameters) for c in read_challenges([header])] == want


@given(st.text(alphabet=st.sampled_from('Bearer="\\,x =basic:/'), max_size=60))
def test_any_challenge_is_read_without_an_error(header: str) -> None:
    for challenge in read_challenges([header]):
        assert challenge.scheme


def test_a_token_service_without_tls_gets_nothing_from_a_registry_with_it(
    login: str, door: Door, tiny: TinyRegistry
) -> None:
    tiny.realm = f"{door.url}/token"
    repository = repository_at(door)
    repository.client.authority._plain = False
    with pytest.raises(RegistryRefused, match="not reached by https"):
        repository.tags()
    assert door.count("GET", "/token") == 0


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"token": 7}', b'{"token": "a\\nb"}'])
def test_a_token_service_without_a_token_is_broken(
    login: str, door: Door, tiny: TinyRegistry, body: bytes
) -> None:
    tiny.realm = f"{door.url}/token"
    door.fail("GET", "/token", status(200, body))
    with pytest.raises(RegistryBroken, match="returned no token"):
        repository_at(door).tags()


def test_a_token_service_with_a_bad_day_is_reported(
    login: str, door: Door, tiny: TinyRegistry
) -> None:
    tiny.realm = f"{door.url}/token"
    door.fail("GET", "/token", status(500))
    with pytest.raises(RegistryBroken, match="answers 500"):
        repository_at(door).tags()


def test_a_token_service_that_hangs_up_is_asked_again(
    login: str, door: Door, tiny: TinyRegistry
) -> None:
    put_image(tiny, "v1", b"layer")
    tiny.token, tiny.realm = "tok", f"{door.url}/token"
    repository = repository_at(door)
    door.fail("GET", "/token", drop(), times=2)
    assert repository.tags() == ["v1"]


def test_a_proxy_is_used_for_registries_elsewhere(
    door: Door, tiny: TinyRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_image(tiny, "v1", b"layer")
    monkeypatch.setenv("http_proxy", door.url)
    client = RegistryClient(parse_reference("reg.example/team/app"), Access(insecure_http=True))
    assert Repository(client, NAME).tags() == ["v1"]
    assert door.asked[-1].headers["host"] == "reg.example"


def test_a_list_of_tags_that_holds_no_tags_is_refused(door: Door, tiny: TinyRegistry) -> None:
    put_image(tiny, "v1", b"layer")
    repository = repository_at(door)
    for body in (b'{"tags": ["a b"]}', b'{"tags": [7]}', b'{"tags": "v1"}', b"[]"):
        door.fail("GET", "tags", with_body(body))
        with pytest.raises(RegistryBroken):
            repository.tags()
    door.fail("GET", "tags", with_body(b'{"tags": null}'))
    assert repository.tags() == []


def test_a_date_says_how_long_to_wait_too() -> None:
    assert retry_after_s("Fri, 01 Jan 2016 00:00:00 GMT") == 0
    assert retry_after_s("7") == 7
    assert retry_after_s("soon") is None


def test_a_wait_of_seconds_is_reported_with_its_reason_and_once(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    client = repository_at(door).client
    lost = Lost("the registry answers 503", wait_s=1)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: client.retry_policy.pause(0, lost), range(3)))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["  the registry answers 503; trying again in 1 s"]


def test_a_short_wait_is_not_reported(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    repository_at(door).client.retry_policy.pause(0, Lost("broke off"))
    assert capsys.readouterr().err == ""
