"""Verifying evidence: from an artifact back to its signatures, statements and every input.

In: a file, a layout folder, a set of weights or a reference in a registry; a trust file, perhaps a
checkout and a policy. Out: a tree of verdicts (valid, unsigned, stale, incomplete, moved, broken)
and the error that belongs to the worst. Asks no network but the registry that the reference names.
Imports every package before it; only the command line imports it.
"""
