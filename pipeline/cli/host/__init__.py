"""`sm120 host`: this machine or an inventory comes in; facts, verdicts and records go out.

`lock.py`, `provision.py` and `verify.py` work on fleets, through the options in `fleet.py`;
`facts.py` and `check.py` on the machine they run on. Imports the shared modules of the cli.
"""
