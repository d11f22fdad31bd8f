"""Many hosts: plays are started, each host is reached once as root, and results are collected.

In come an inventory and what its roles promised (ansible/promises.yml); out come records of facts
and a `FleetResult`. The promises themselves are judged by pytest in a process of its own, which is
why nothing here imports host.promises. May import host.facts, host.rules and host.probes.
"""
