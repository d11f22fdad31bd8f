"""Runs a program that can reach only the files it was given: no network, no other processes.

In: a command and folders to read and to write. Out: its output, and what this machine could not
keep from it. `start` runs as a program of its own and imports the standard library alone.
May import files, proc, model and errors.
"""
