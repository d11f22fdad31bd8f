"""A read-only Hub for the local network: neighbours fetch with unmodified clients (HF_ENDPOINT).

In come folders of locked sets; out go the Hub's listings and files, of which only those that were
proved against their lock are sent. May import `weights.disk` and the top of `weights`.
"""
