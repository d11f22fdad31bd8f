"""Compares quality: token counts, tool schemas, agreement with a reference, imported scores.

In: the address of an OpenAI-compatible server, the template and tokenizer of its model, a recorded
reference. Out: a verdict for each part with its numbers, their intervals and the bar beside them,
and every request and answer as evidence. Imports smoke, fit, and the part images.
"""
