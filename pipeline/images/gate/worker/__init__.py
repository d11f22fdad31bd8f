"""Compiles and interprets an engine's kernels for a card that is not there.

In: a job of cases (JSON). Out: a line of JSON for each case. Runs in the image's Python, which has
no pipeline: it imports itself relatively, the standard library, torch and Triton, and nothing else.
`recorder` compiles for smem, `numbers` with `interpreter` and `references` computes for numerics.
"""
