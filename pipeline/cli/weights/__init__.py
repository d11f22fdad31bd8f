"""`sm120 weights`: names of sets and folders come in; locks, files and statements go out.

One module for each stage that a set goes through: lock, fetch, check and repair, sign, serve; and
`fit`, which needs no files. Imports the shared modules of the cli. `verify` and `scrub` run in
nightly timers, so they load neither an HTTP client nor key material before they need it.
"""
