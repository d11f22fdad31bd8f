"""Promises of the roles, as testinfra tests: one file for each role, one test for each promise.

In come a host's promises, its facts and a root shell on it; out come rows of promise, verdict,
reason and fix. run.py calls the tests itself, without pytest: many hosts are judged at once, each
in a thread. May import all other parts of host.
"""
