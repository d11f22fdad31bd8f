"""Benchmarks: how fast a server is, measured by a client that knows its own error.

In: the address of an OpenAI-compatible server, and a workload. Out: a run, which is every raw
request, what follows from them, and what stood behind them. May import artifacts,
hosts and core.
"""
