"""Statements, signatures and trust: the one way in which this project claims and signs something.

In: findings of any package (an image's provenance, a gate's result, host facts, weights) and a
key. Out: in-toto statements in DSSE envelopes, cosign payloads, Sigstore bundles; read back from
anybody's bytes, they are closed models, and a trust file decides which signatures count.
Imports only the shared modules: errors, files, log, proc, model, known, foreign_json, yaml_file.
"""
