"""What every part uses: errors, verdicts, files, JSON and YAML readers, logs, processes and HTTP.

Imports nothing of the other parts.
"""
