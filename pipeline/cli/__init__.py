"""The command `sm120`: arguments come in, text or JSON and an exit code go out.

`verbs.py` lists every verb with its sentence and its module, `main.py` turns errors into exit
codes, and one module holds the verbs of each group. A verb reads its options, calls one function
of pipeline.app and prints the result.
"""
