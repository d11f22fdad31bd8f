"""Chat templates: a reference that renders them, and the conversations that try them.

In: the template and tokenizer files of a model, conversations as people send them to a server. Out:
the text that the model must read, and its number of tokens. Imports nothing of the other packages.
"""
