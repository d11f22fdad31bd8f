"""Are the FP4 and FP8 matrix products of a recipe right on this machine's card?

In: a recipe, its model's architecture and a container engine. Out: the products that one card
computes after sharding, and a verdict on every route that the engine has to each. `compute` runs
inside the image and imports nothing of ours. May import the shared modules, fit, oci, recipe, serve
and store.
"""
