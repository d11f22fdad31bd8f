"""`nox -s chaos`: every stage of the pipeline meets every way in which a machine lets it down.

A stage is a command of ours with small real parts (stages*.py), a fault is what happens to it
(faults.py: kill -9, a power cut, a lying registry). A trial runs the command in a fresh copy of its
state, lets the fault strike at a moment that the seed draws, and judge.py says what became of it.
All of it happens in namespaces of its own: mounts, networks and processes end with the run.
"""
