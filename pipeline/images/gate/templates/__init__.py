"""Chat templates: a reference that renders them, and the gate that compares an image with it.

In: the template and tokenizer files of a model, conversations as people send them to a server, an
image's `gates/templates.yaml`. Out: the text that the model must read, with its number of tokens,
and a verdict on the text that the image makes. `cases`, `files` and `renderer` import nothing of
the other packages; `sources` and `judge` take environments from `smem`, markers from `parsers`.
"""
