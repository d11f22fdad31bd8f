"""The user's own keys as files. Imports no cryptography, so that looking for a key is cheap."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pipeline.core.errors import KeyInvalid
from pipeline.core.files import read_at_most, write_bytes
from pipeline.core.model import sha256_of

DEFAULT = "default"  # names the key that signs, if there are several
# it becomes a part of a path
_NAME = re.compile(r"[a-z0-9][a-z0-9.+-]{0,79}")
_PEM = re.compile(rb"-----BEGIN PUBLIC KEY-----\s+([A-Za-z0-9+/=\s]+?)-----END PUBLIC KEY-----\s*")
_MOST_BYTES = 1 << 16


def default_folder(environment: Mapping[str, str]) -> Path:
    """The default folder of a user's keys."""
    config = environment.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        return Path(config).expanduser() / "sm120" / "keys"
    except RuntimeError as error:
        hint = "Set HOME or XDG_CONFIG_HOME, or name a folder."
        raise KeyInvalid("this user has no home folder, so no folder for keys", hint) from error


def own_key(environment: Mapping[str, str]) -> Path | None:
    """The key that signs by default: the one that the file `default` names, else the only one."""
    # a container may run as a user id without an account, or in a home that it cannot read
    with suppress(KeyInvalid, OSError):
        folder = default_folder(environment)
        try:
            data = read_at_most(folder / DEFAULT, _MOST_BYTES) or b""
        except OSError:
            # never guess which of several the user means
            keys = sorted(folder.glob("*.pem"))
            return keys[0] if len(keys) == 1 else None
        name = data.decode("ascii", "replace").strip()
        return folder / f"{name}.pem" if _NAME.fullmatch(name) else None
    return None


def use_first_key(environment: Mapping[str, str], name: str) -> bool:
    """Makes a new key the default, unless there is one already."""
    if (known := own_key(environment)) is not None and known.stem != name:
        return False
    write_bytes(default_folder(environment) / DEFAULT, f"{name}\n".encode())
    return True


def own_public_keys(environment: Mapping[str, str]) -> list[Path]:
    """The public halves of the keys that this user holds."""
    try:
        public = sorted(default_folder(environment).glob("*.pub"))
        # a public half alone is another user's: trust files are for those
        return [path for path in public if path.with_suffix(".pem").is_file()]
    except (KeyInvalid, OSError):
        return []


def public_id(path: Path) -> str | None:
    """The id of a public key file, from its bytes alone."""
    try:
        pem = _PEM.fullmatch(read_at_most(path, _MOST_BYTES) or b"")
        return sha256_of(base64.b64decode(b"".join(pem[1].split()))) if pem else None
    except (OSError, binascii.Error):
        return None
