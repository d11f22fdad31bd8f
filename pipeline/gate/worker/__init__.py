"""Compiles an engine's kernels for a card that is not there; `__main__.py` says how."""
