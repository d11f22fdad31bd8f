"""Serving: an engine in a container, from a recipe to the first answer and to its end.

In: a `Launch` of the recipe package, an image of the store, weights on disk. Out: a container whose
image is the built one, and an entry in the list of attempts.
Imports recipe and all packages before it.
"""
