"""Compiles a locked source in a toolchain image, without network, into a layer of the store.

In: a source's spec and lock, the plan of its toolchain image. Out: a compiled tree as a layer under
its key, the log of each step, and what the result says of itself. Objects are kept by what they
were compiled from. May import containers, assemble, fetch, lock, spec, store, oci.
"""
