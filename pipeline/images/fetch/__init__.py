"""Brings locked files into the store, from wherever this machine is configured to get them.

In: pins of a lock; the settings of pip, uv and apt. Out: files in the store whose sha256 is the
locked one. Downloads resume and run in parallel; sources only propose, the lock decides.
Imports `net`, `oci`, `spec`, `store`, `lock` and `registry`.
"""
