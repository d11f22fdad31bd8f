"""The documentation held against the code: what is generated, what is run, what is named.

`python -m tests.docs` says which pages are out of date, `--write` brings them up to date.
"""
