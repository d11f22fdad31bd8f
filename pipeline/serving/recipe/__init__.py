"""Recipes: how a model is served on given cards, from the spec to the exact engine command.

In: recipes/*.yaml, a user's overrides, the images and weights they name. Out: a `Launch`, which
says everything that a container engine, a unit file or a shell needs, and its renderings.
Imports the parts artifacts and images.
"""
