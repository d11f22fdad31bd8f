"""Judges an image for a card that is not there: shared memory, numbers, patches, machine code.

In: a plan of an image and its gate files, or for machine code a built image. Out: a `GateRun` for
each gate (`stage`), whose `Evidence` is kept with the image and stated when it is published.
Order: smem, then numerics, then patches; arch needs none of them; stage uses all.
May import what makes images (spec, store, lock, fetch, assemble), never what states or publishes.
"""
