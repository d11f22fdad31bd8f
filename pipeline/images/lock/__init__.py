"""From a spec to a lock: exact wheels, .debs, base images and host packages, without addresses.

In: a spec, and ways to ask indexes (uv, signed Release files). Out: sealed locks that name files
by sha256, their differences, and exports for pip. The only package that asks what is newest.
Imports the shared modules, `oci` and `spec`.
"""
