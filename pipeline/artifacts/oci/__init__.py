"""OCI images as documents and files, of any origin.

In: bytes and JSON from registries, folders and archives. Out: descriptors, manifests, configs,
references, entries of layers, and the records of built images; layouts and Docker archives.
It fetches nothing and builds nothing. Imports the shared modules, and `net` to show foreign text.
"""
