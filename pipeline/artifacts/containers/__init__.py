"""Runs a program that can reach only the files it was given: no network, no other processes.

In: a command and folders to read and to write. Out: its output, and what this machine could not
keep from it. `start` runs as a program of its own and imports the standard library alone.
`backend` names where steps of a build run: in `sandbox` (Linux alone), `docker` or `podman`, which
also start servers. May import core, oci, store.
"""
