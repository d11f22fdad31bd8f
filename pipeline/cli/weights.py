"""`sm120 weights`: model files that are what their lock says, from the Hub to the LAN."""

from __future__ import annotations

import click

from pipeline.cli.lazy import Lazily

_EPILOG = """\b
The usual way through:
  sm120 weights list                              what this checkout knows, and what is locked
  sm120 weights fit kimi-k2.6 --gpus 8            will it fit, and with how much context
  sm120 weights lock kimi-k2.6                    look up every file's size and hash
  sm120 weights fetch kimi-k2.6 --to /models/k26  bring them; resumes, keeps nothing wrong
  sm120 weights verify /models/k26                prove them, offline, at the disk's speed
  sm120 weights serve /models/k26                 be a Hub for the neighbours"""


_COMMANDS = Lazily(
    {
        "check-signature": "weights_sign:check_signature",
        "fetch": "weights_fetch:fetch_set",
        "fit": "weights_fit:fit",
        "list": "weights_lock:list_sets",
        "lock": "weights_lock:lock_sets",
        "record": "weights_sign:record",
        "scrub": "weights_check:scrub",
        "serve": "weights_serve:serve",
        "sign": "weights_sign:sign",
        "verify": "weights_check:verify",
    }
)


@click.group(commands=_COMMANDS, epilog=_EPILOG)
def weights() -> None:
    """Lock, fetch, verify, serve and fit model weights."""
