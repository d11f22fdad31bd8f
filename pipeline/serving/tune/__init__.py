"""Tunes an engine's mixture-of-experts kernel for a recipe, on the card that will serve it.

In: a recipe, the shape of its model and an image. Out: a table in the engine's own format, with a
record of the card, the image and every size, which `serve` mounts where all of them are the same.
`moe` says whether the recipe reads such a table and at which shape; `worker` runs in the image, a
process for each trial; `trials` asks it and keeps every answer; `search` decides; `table` writes.
"""
