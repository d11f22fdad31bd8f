"""Results of other load generators, for a look side by side: one reader for each program.

A number of theirs counts as one of ours only where both are defined alike; otherwise it keeps its
own name, and the difference is named.
"""
