"""Promises of the roles, as testinfra tests: one file for each role, one test for each promise.

In come a host's promises and a root shell on it; out come rows of promise, verdict, reason and
fix. Files are named test_*.py because pytest collects them (plugin.py); the project's own test
suite does not. May import all other parts of host.
"""
