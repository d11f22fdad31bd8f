"""The parser gate: does a client get what the model meant, however the answer is cut?

In: a planned image, its `gates/parsers.yaml`, formats and truths. Out: a verdict on each truth of
each family of models, with the smallest stream that breaks it. It may import the gate's common
files and what the shared-memory gate makes: engine trees, environments, workers.
"""
