from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.artifacts.oci.reference import parse_reference
from pipeline.artifacts.registry import auth as trust
from pipeline.artifacts.registry.access import Access
from pipeline.artifacts.registry.client import RegistryClient
from pipeline.core.errors import RegistryUnreachable
from tests.testbed.registry import make_certificates

HOST = "reg.example:5000"


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    home = tmp_path / "made"
    home.mkdir()
    make_certificates(home, "127.0.0.1")
    return home


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where Docker keeps what it was given for the registry."""
    folder = tmp_path / "certs.d" / HOST
    folder.mkdir(parents=True)
    monkeypatch.setattr(trust.certificate_files, "__defaults__", ((str(folder.parent),),))
    return folder


def count(context: ssl.SSLContext) -> int:
    return context.cert_store_stats()["x509_ca"]


def certificate_shown(client: ssl.SSLContext, certificates: Path) -> bytes | None:
    """What a server that asks for a certificate gets to see."""
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.crt")
    server.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    server.verify_mode = ssl.CERT_OPTIONAL
    server.verify_flags &= ~ssl.VERIFY_X509_STRICT  # the CA of the tests has no key usage
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(back, there, server_hostname="127.0.0.1"),
        server.wrap_bio(there, back, server_side=True),
    ]
    for end in ends * 3:
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return ends[1].getpeercert(binary_form=True)


def test_a_ca_named_by_hand_is_believed_besides_the_systems(kept: Path, certificates: Path) -> None:
    before = count(trust.registry_context(HOST, None))
    assert count(trust.registry_context(HOST, certificates / "ca.crt")) == before + 1


def test_a_ca_kept_for_docker_is_believed_for_its_registry_alone(
    kept: Path, certificates: Path
) -> None:
    before = count(trust.registry_context(HOST, None))
    (kept / "ca.crt").write_bytes((certificates / "ca.crt").read_bytes())
    assert count(trust.registry_context(HOST, None)) == before + 1
    assert count(trust.registry_context("reg.example:5001", None)) == before


def test_a_client_certificate_is_taken_with_its_key(kept: Path, certificates: Path) -> None:
    (kept / "client.cert").write_bytes((certificates / "server.crt").read_bytes())
    (kept / "client.key").write_bytes((certificates / "server.key").read_bytes())
    client = trust.registry_context(HOST, certificates / "ca.crt")
    shown = certificate_shown(client, certificates)
    assert shown == ssl.PEM_cert_to_DER_cert((certificates / "server.crt").read_text())


def test_a_ca_without_key_usage_is_taken_by_every_python() -> None:
    """`openssl req -x509` makes it so; Python 3.13 refuses it by default."""
    assert not trust.registry_context(HOST, None).verify_flags & ssl.VERIFY_X509_STRICT


def test_without_a_client_certificate_none_is_shown(kept: Path, certificates: Path) -> None:
    (kept / "client.cert").write_bytes((certificates / "server.crt").read_bytes())
    client = trust.registry_context(HOST, certificates / "ca.crt")
    assert certificate_shown(client, certificates) is None


def test_nobody_is_believed_without_a_certificate(kept: Path) -> None:
    context = trust.registry_context(HOST, None)
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


@pytest.mark.parametrize("name", ["ca.crt", "client.cert"])
def test_a_file_that_is_no_certificate_is_an_error(kept: Path, name: str) -> None:
    (kept / name).write_text("no certificate")
    (kept / "client.key").write_text("no key")
    with pytest.raises(RegistryUnreachable, match=name):
        trust.registry_context(HOST, None)


def test_a_ca_on_loopback_means_tls(certificates: Path) -> None:
    here = parse_reference("127.0.0.1:9/app")
    assert (
        RegistryClient(here, Access(ca_file=certificates / "ca.crt")).base == "https://127.0.0.1:9"
    )
