"""The architecture gate: does every object of a built image hold code that the card can run?

In: a built image's layers and gates/arch.yaml. Out: an `ArchReport` for a card. The way:
forward_reader → elf, fatbin → modules (what a file holds), facts (kept by hash), verdict, report.
Needs none of NVIDIA's tools. May import the rooms before gate, none of its neighbours.
"""
