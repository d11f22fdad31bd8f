"""The program that runs in the image's own Python: it imports nothing of the pipeline.

In: a job as JSON. Out: a line of JSON for each case. It may import the standard library, and the
engine that it is pointed at.
"""
