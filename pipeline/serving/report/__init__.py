"""The report: results of benchmarks as one page that people open, and as PDF, Markdown and CSV.

In: results of the bench room, the attempts of the serve room, published tables that ship here as
reference data. Out: files in which every number has its place in the data that the page embeds, so
that a changed digit is found.
May import bench, serve and the rooms before them.
"""
