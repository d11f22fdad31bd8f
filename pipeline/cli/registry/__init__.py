"""`sm120 registry`: references to images come in; pushed images, pulled layouts and lists go out.

`publish.py` puts the order of a publish together, `look.py` reads a registry and cleans it up.
Imports the shared modules of the cli.
"""
