"""Function tests of GPUs and NCCL settings by measurement.

In come a Python or an image that has torch and what to test; out comes a `ProbeReport` with a row
for each test. `worker` is the part that runs in that other Python. Imports nothing of the other
parts of host.
"""
