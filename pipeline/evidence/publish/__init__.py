"""Publishes a built image with its evidence, and clears what nothing names any more.

In: images of the store with their gate results and signed statements, a repository and a tag. Out:
blobs, manifests and attachments in the registry, the tag last; and a record of what went where.
Imports the packages before it, above all `registry`, `oci` and `attest`; nothing of hosts.
"""
