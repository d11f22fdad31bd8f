"""The smoke ladder: what a running server must prove before people rely on its answers.

In: the address of an OpenAI-compatible server, and what a recipe expects of it. Out: a verdict for
each rung with its checks, the last good rung, and every request and answer as evidence.
Imports recipe, and the parts artifacts and images.
"""
