"""What is done with runs: state them, compute them again, compare two, gate one by another.

Apart from the client, whose digest is of its own code alone.
"""
