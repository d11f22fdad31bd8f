"""Check whether files are still what their lock names, and repair them.

In comes a `Place`; out come a `Report` of `verify`, a night's slice of `scrub`, and what `repair`
did about each damaged file. Verifying needs no network; repairing fetches through
`weights.transfer`. May import that, `weights.disk` and the top of `weights`.
"""
