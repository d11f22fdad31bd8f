"""Statements about a built image: provenance, bills of materials, results, rebuilds.

In: a built image with its plan, the checkout and the store. Out: signed statements beside the image
in the store, and the set that lists all of them. One model for each predicate writes and reads it.
Imports the packages before it, above all `assemble`, `gate` and `attest`; no registry, no network.
"""
