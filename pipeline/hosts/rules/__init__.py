"""Judgement of facts: rules with a fix each, known issues, and hosts that differ from their peers.

In come `HostFacts`, log lines and measured rows; out come verdicts, findings and outliers.
Nothing here looks at a machine. May import hosts.facts and hosts.probes.
"""
