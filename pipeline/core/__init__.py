"""What every part uses: errors, files, JSON and YAML readers, logs, processes and HTTP.

Imports nothing of the other parts.
"""
