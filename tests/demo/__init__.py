"""One story with real parts, from a fresh host to a number that can be walked back: `nox -s demo`.

It lives here, and not in `pipeline`, because its nodes, registry and Hub are those of the tests:
who installs the wheel has none of them. Its steps are the commands that a user types.
"""
