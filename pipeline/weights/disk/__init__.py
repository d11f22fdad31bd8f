"""Locked files on a disk, without any network: their hashes, their state, their names.

In comes a `Place` (a folder and the lock of what it holds); out come readings (hashes of files),
findings (what is missing, odd or extra), and the receipt of what was proved when. May import
`weights.model` and `weights.place`, `lock` for seals, and the shared modules.
"""
