"""What the role nvidia_repository makes of a key and of apt's words, without a host."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.integration.roles.role_values import role_values
from tests.testbed.signer import new_signer

evaluated = partial(role_values, "nvidia_repository")
BINARY, ARMORED = (f"/etc/apt/keyrings/sm120-nvidia.{end}" for end in ("gpg", "asc"))


def test_apt_gets_an_armored_key_and_a_binary_one_under_the_name_it_reads_them_by(
    tmp_path: Path,
) -> None:
    with new_signer("vendor@example.invalid") as signer:
        (tmp_path / "armored").write_bytes(signer.armored())
        (tmp_path / "binary").write_bytes(signer.keyring.read_bytes())
    names = ("armored", "binary", "missing")
    cases = [{"nvidia_repository_key": str(tmp_path / name)} for name in names]
    places = evaluated(tmp_path, "nvidia_repository_key_place", cases)
    assert places == [ARMORED, BINARY, BINARY]


SQV = (
    "W: OpenPGP signature verification failed: http://m ./ InRelease: Sub-process /usr/bin/sqv "
    "returned an error code (1), error message is: Signing key on EB69 is not bound: No binding "
    "signature at time 2026-01-29T20:38:48Z   because: Policy rejected non-revocation signature "
    "(PositiveCertification) requiring second pre-image resistance   because: SHA1 is not "
    "considered secure since 2026-02-01T00:00:00Z\n"
    "E: The repository 'http://m ./ InRelease' is not signed.\n"
)
FORGED = "W: GPG error: http://m ./ InRelease: BADSIG 1234\nE: The repository is not signed.\n"
HELD = (
    "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 2517 (apt-get)\n"
    "E: Unable to lock directory /var/lib/apt/lists/\n"
)
# Where apt has an older index it keeps that, and does not call the repository unsigned.
KEPT = (
    "W: An error occurred during the signature verification. The repository is not updated and the "
    "previous index files will be used. OpenPGP signature verification failed: http://m ./ "
    "InRelease: Sub-process /usr/bin/sqv returned an error code (1), error message is: "
)
CHANGED = f"{KEPT}Verifying signature:            Message has been manipulated\n"
OTHER_KEY = f"{KEPT}Missing key 74B856AF, which is needed to verify signature.\n"
REVOKED = (
    f'{KEPT}Signing key on 864EDF82 is bad:            Invalid key: "certificate is revoked"\n'
)
SHA1_INDEX = (
    f"{KEPT}Verifying signature:            Policy rejected non-revocation signature (Text) "
    "requiring collision resistance   because: SHA1 is not considered secure since "
    "2013-02-01T00:00:00Z\n"
)
FULL = "E: Failed to fetch http://m/./Packages  Write error - write (28: No space left on device)\n"
LOST = "E: Failed to fetch http://m/./InRelease  Could not connect to m:80\n"


def test_each_reason_for_which_apt_refuses_is_told_as_what_it_is(tmp_path: Path) -> None:
    reported = {
        SQV: "is bound by SHA-1 only",
        FORGED: "its index was changed after it was signed",
        CHANGED: "its index was changed after it was signed",
        OTHER_KEY: "its index was changed after it was signed",
        REVOKED: "is revoked",
        SHA1_INDEX: "Sign the mirror's index again",
        FULL: "The disk that holds apt's lists",
        HELD: "Another program has been reading apt's indexes",
        LOST: "cannot be read from this host",
    }
    cases = [
        {
            "nvidia_repository_url": "http://m",
            "nvidia_repository_key": "/k/3bf863cc.pub",
            "pinned_packages_updated": {"rc": 100, "stderr": message},
        }
        for message in reported
    ]
    answers = evaluated(tmp_path, "nvidia_repository_why", cases)
    for answer, output in zip(answers, reported.values(), strict=True):
        assert {message for message in reported.values() if message in answer} == {output}
