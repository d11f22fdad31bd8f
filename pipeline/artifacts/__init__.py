"""What images and signatures are made of: OCI documents, registries, the store, statements, machine
code, and the containers that programs of an image run in.

Imports core.
"""
