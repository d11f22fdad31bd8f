"""What machine code a program or library holds.

In: the bytes of a file, or a disassembler's lines. Out: the GPU code of its fatbins and cubins by
what it was compiled for, and the instruction sets of its CPU. May import nothing of ours.
"""
