"""From a spec to a judged image: lock, fetch, assemble, compile, gate, and a start without a GPU.

Imports core and artifacts.
"""
