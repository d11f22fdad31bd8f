"""`sm120 image`: names of images come in, what the rooms know or make of them is shown.

Locking, planning, building and delivering are done in lock, assemble, fetch and oci; here the
steps of a build stand in their order: build, state, gate, state again. Imports the shared modules
of the cli and, for a build with gates, `cli.gate.stage`.
"""
