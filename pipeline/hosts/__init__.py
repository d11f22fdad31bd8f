"""Hosts: what a machine is, whether it suits SM120 engines, and whether it works.

In come a captured machine, an inventory and the host lock; out come facts, verdicts with a fix
each, measurements, and results for a fleet. facts → probes → rules → fleet → promises, each
importing only what stands before it, and from other packages only those below host.
"""
