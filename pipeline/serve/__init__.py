"""Serving: an engine in a container, from a recipe to the first answer and to its end.

In: a `Launch` of the recipe room, an image of the store, weights on disk. Out: a container that was
compared with what was built, and an entry in the list of attempts.
Imports recipe and all rooms before it.
"""
