"""The program that renders conversations in the image's own Python; imports no other package of us.

In: a job as JSON. Out: a line of JSON for each case. It may import the standard library, the engine
that it is pointed at, and what the worker of the parser gate has beside it.
"""
