"""`sm120 evidence`: artifacts come in; statements, keys and a verdict on them go out.

`make.py` writes and signs, `verify.py` finds what an artifact is and judges its evidence,
`keys.py` makes and lists keys. Imports the shared modules of the cli, and `cli.registry` for
images that lie in one.
"""
