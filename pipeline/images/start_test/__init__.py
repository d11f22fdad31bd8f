"""Whether a built image starts: proved by running it as its own user, without a GPU.

In: a built image of the store, the flags that its engine is known to accept. Out: a run with a
named verdict for each check, and its evidence. Imports the packages before it, above all
`source` (unpacked images), `engine` (argument parsers) and `gate` (runs).
"""
