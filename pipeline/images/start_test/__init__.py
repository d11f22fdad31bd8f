"""Whether a built image starts: proved by running it as its own user, without a GPU.

In: a built image of the store, the flags that its engine is known to accept. Out: a run with a
named verdict for each check, and its evidence. Imports the rooms before it, above all `source`
(boxes to run in), `serve` (argument parsers, container engines) and `evidence` (runs).
"""
