"""Container registries: the OCI distribution API, for reading and writing.

In: a reference, a login and CAs as Docker keeps them, blobs of the store. Out: documents of `oci`,
blobs that match their digest, pushed blobs and manifests, lists of tags and referrers.
Imports the shared modules, `net`, `oci` and `store`; nothing of images, gates or evidence.
https://github.com/opencontainers/distribution-spec/blob/main/spec.md
"""
