"""Works with runs: states them, computes them again, compares two, gates one by another.

Kept apart from the client, whose digest covers its own code alone.
"""
