"""Compiles the kernels of an image's engine without a card, and packs them as a layer.

In: an image's plan and the cases of its base's gate. Out: a layer of entries of Triton's cache
with an index that names the cases and recipes each serves. `inside` runs at the image's paths;
`target` puts cases to it, `layer` judges and packs entries, `sm120_warm` reads them in the image.
`modules` does the same for what FlashInfer compiles, with `compiler` at the image's paths and
`flashinfer_jit_cache` as its reader.
"""
