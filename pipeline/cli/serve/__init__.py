"""Commands about served models: serve, status, logs, stop, attempts.

Each is a thin door to pipeline/serve; the table of all verbs is in pipeline/cli/verbs.py.
"""
