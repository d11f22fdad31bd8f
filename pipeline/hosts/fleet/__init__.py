"""Many hosts: start plays, reach each host once as root, and collect the results.

In come an inventory and what its roles promised (ansible/promises.yml); out come records of facts
and a `FleetResult`. host.promises stands after this part, so the caller hands its judge in. May
import host.facts, host.rules and host.probes.
"""
