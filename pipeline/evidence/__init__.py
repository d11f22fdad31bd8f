"""Statements about artifacts: make them, publish them with an image, and verify them.

Imports all parts but app and cli.
"""
