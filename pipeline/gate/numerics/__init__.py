"""The numerics gate: do the kernels that fit compute the right thing?

In: an image that smem has opened, and numerics.yaml. Out: `NumericsResults`, each case's largest
error beside what is allowed for its types. May import smem.
"""
