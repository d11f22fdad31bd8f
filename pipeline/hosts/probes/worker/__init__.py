"""The function tests themselves, run by the engine's Python: `python3 FOLDER OUT.json`.

In comes the command line; out comes one JSON file. It may import the standard library and torch,
and its own modules relatively: in a container this folder is mounted alone.
"""
