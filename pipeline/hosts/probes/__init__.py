"""Function tests of GPUs and NCCL settings by measurement.

In come what to test and a Python or an image with torch; out comes a `ProbeReport` with a row
for each test. `worker` is the part that runs in that other Python. Imports nothing of the other
parts of host.
"""
