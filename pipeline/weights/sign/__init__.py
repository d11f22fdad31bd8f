"""Statements about a verified folder that others can check.

In comes a `Place`; out come a signature in the OpenSSF model-signing format over its files, and an
in-toto statement of what was verified and how. May import `weights.check`, `weights.disk`, the top
of `weights`, and `attest`, which knows envelopes and keys.
"""
