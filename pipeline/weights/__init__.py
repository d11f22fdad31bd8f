"""Model weights: from a spec to files on a disk that are exactly what its lock names.

In comes `lockfiles/weights/NAME.yaml`; out come a lock (every file's size and hash at one commit),
a folder that holds those files, and statements about it. This level has what everything shares:
specs and locks, the Hub's API, folder layouts. Packages in order, each may import those before
it: disk, transfer, check, sign, serve. From outside: the shared modules, net,
spec, lock, fetch, attest.
"""
