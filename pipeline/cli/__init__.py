"""The command `sm120`: arguments come in, text or JSON and an exit code go out.

`verbs.py` lists every verb with its sentence and its module, `main.py` turns errors into exit
codes, and each folder holds the verbs of one group. What verbs share stands beside these two:
options, the checkout and the store, keys, statements. The cli imports any room and no room
imports it; a verb reads its options, calls one or two functions of the rooms and shows what they
return.
"""
