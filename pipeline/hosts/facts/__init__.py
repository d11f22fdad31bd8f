"""Facts of one machine.

In comes a capture (files and program output, taken by capture.py, which needs only the standard
library); out come `HostFacts`, in which every field is a value or the reason why there is none,
and the differences between two sets of facts. Imports nothing of the other parts of host;
summary.py takes the predicate of a signed statement from attest.
"""
