"""`sm120 weights`: model files that are what their lock says, from the Hub to the LAN."""

from __future__ import annotations

import click

from pipeline.cli.weights_check import scrub, verify
from pipeline.cli.weights_fetch import fetch_set
from pipeline.cli.weights_fit import fit
from pipeline.cli.weights_lock import list_sets, lock_sets
from pipeline.cli.weights_serve import serve
from pipeline.cli.weights_sign import check_signature, record, sign

_EPILOG = """\b
The usual way through:
  sm120 weights list                              what this checkout knows, and what is locked
  sm120 weights fit kimi-k2.6 --gpus 8            will it fit, and with how much context
  sm120 weights lock kimi-k2.6                    look up every file's size and hash
  sm120 weights fetch kimi-k2.6 --to /models/k26  bring them; resumes, keeps nothing wrong
  sm120 weights verify /models/k26                prove them, offline, at the disk's speed
  sm120 weights serve /models/k26                 be a Hub for the neighbours"""


@click.group(epilog=_EPILOG)
def weights() -> None:
    """Lock, fetch, verify, serve and fit model weights."""


for command in (
    *(list_sets, fit, lock_sets, fetch_set, verify, scrub),
    *(serve, sign, check_signature, record),
):
    weights.add_command(command)
