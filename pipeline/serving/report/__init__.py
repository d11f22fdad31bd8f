"""The report: results of benchmarks as one page that people open, and as PDF, Markdown and CSV.

In: results of `bench`, the attempts of `serve`, published tables that ship here as
reference data. Out: files in which every number has its place in the data that the page embeds, so
that a changed digit is found.
May import bench, serve, artifacts and hosts.
"""
