"""One user's store: finished things by digest, shared by all builds.

In: blobs, layers with their tables of contents, records of images. Out: the same, or an error if
the disk holds something else. A folder is only written once it is marked as a store.
Imports the shared modules and `oci`.
"""
