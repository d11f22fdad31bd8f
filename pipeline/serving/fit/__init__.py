"""Does a model fit on a machine, with how much context, and where do its experts go? No GPU needed.

In comes what a user names (a spec, a repository, a folder, a config.json, a GGUF file) and a
machine; out come the bytes on each card and on the host, the room for the KV cache, and flags to
launch with. Safetensors (sglang, vLLM): config (layers) → shape → parts → engine → answer. GGUF
(ik_llama.cpp): gguf → placement. May import the shared modules, spec, and of weights only `model`
and `place`; the caller passes the function that asks the Hub.
"""
