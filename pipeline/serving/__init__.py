"""A model on cards: recipes, memory, servers, smoke tests, benchmarks and reports.

Imports core, artifacts, images, weights and hosts.
"""
