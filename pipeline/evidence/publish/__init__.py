"""Publishing a built image with its evidence, and clearing what nothing names any more.

In: images of the store with their gate results and signed statements, a repository and a tag. Out:
blobs, manifests and attachments in the registry, the tag last; and a memory of what was put where.
Imports the packages before it, above all `registry`, `oci` and `attest`; nothing of hosts.
"""
