"""Bringing locked files to a folder: routes, ranges in parallel, resuming, retries.

In come a `Place`, the files wanted and the sources of this machine (folders, neighbours, the Hub
by HTTP or Xet, and peers that fetch the same set); out come files that have their names only when
their hashes are right. May import `weights.disk`, the top of `weights`, `net` and `fetch`.
"""
