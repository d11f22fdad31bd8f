"""Locked files into an OCI image, without Docker, root or emulation.

In: a spec with its lock, and inputs of the store. Out: an `ImagePlan`, then layers, a config and a
manifest in the store, whose digest must be the golden one. The same bytes on every machine.
Imports `oci`, `spec`, `store`, `lock` and `fetch`.
"""
