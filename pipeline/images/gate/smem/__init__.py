"""The shared-memory gate: does every Triton kernel of an engine fit the card?

In: an image's plan, its engine and its cases. Out: a `GateResult` with a verdict for each case. In
order: cases (what to call), engine → environment (with what), run (the workers),
results (the verdicts), image_gate (all of it for an image, and other block sizes). May import
containers and the packages before gate.
"""
