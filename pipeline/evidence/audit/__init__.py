"""Auditing bills of materials: which packages of an image are known to be vulnerable.

In: a bill of materials, and a folder with advisories as OSV and Debian's tracker publish them. Out:
findings, those accepted by the image's spec among them, as values and as VEX documents. Asks no
network. Imports `statements`, artifacts and images.
"""
