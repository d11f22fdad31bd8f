"""Text that no sound model writes: the signs of wrong kernels, torn caches and lost tokens."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# A run of one character; lines, tables and dots of real answers are left out.
_RUN = re.compile(r"([^\s\-=_*.#`~|─━\d])\1{11,}")
# FP4 products that are all zero pick token 0, which is `!` for many tokenizers.
_BANGS = re.compile(r"!{4,}")
_LOOP = re.compile(r"(.{2,80}?)\1{5,}", re.S)
_CONTROL = re.compile(r"[\x01-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LOOKED_AT = 4000  # characters from the end, where loops are; the pattern is quadratic
_FOREIGN_SHARE = 0.1
# Where a prompt asks for no names, two letters of these are a word that slipped in.
_ALIEN_WORD = 2
_ALIEN = frozenset(
    ("CJK", "HIRAGANA", "KATAKANA", "HANGUL", "CYRILLIC", "ARABIC", "HEBREW", "THAI", "DEVANAGARI")
)
_FEWEST_LETTERS = 8


def corruption(
    text: str,
    scripts: Sequence[str] = ("LATIN",),
    *,
    is_cut: bool = False,
    has_names: bool = True,
) -> str:
    """What is wrong with a text; empty where nothing is. `is_cut`: it ended at the token limit.

    `has_names`: it may name things in another script.
    """
    if "\x00" in text:
        return "it has NUL characters"
    if found := _CONTROL.search(text):
        return f"it has the control character U+{ord(found[0]):04X}"
    # a character of several tokens may be cut off by the limit
    if "\ufffd" in (text.rstrip("\ufffd") if is_cut else text):
        return "it has U+FFFD, the sign for a broken character"
    if _BANGS.search(text):
        return "it has `!!!!`"
    end = text[-_LOOKED_AT:]
    # lines of tables and long numbers repeat signs and digits, loops of a model repeat words
    loops = (loop[1] for loop in _LOOP.finditer(end) if any(c.isalpha() for c in loop[1]))
    run = _RUN.search(end)
    if part := run[1] if run else next(loops, ""):
        return f"it repeats {part!r}"
    # Unicode begins the name of a letter with its script: LATIN, CJK, CYRILLIC …
    names = (unicodedata.name(letter, "UNKNOWN") for letter in text if letter.isalpha())
    letters = [name.split(" ")[0].split("-")[0] for name in names]
    foreign = [script for script in letters if script not in scripts]
    aliens = sum(s in _ALIEN for s in foreign) if tuple(scripts) == ("LATIN",) else 0
    is_few = len(letters) < _FEWEST_LETTERS or len(foreign) <= _FOREIGN_SHARE * len(letters)
    if is_few and (has_names or aliens < _ALIEN_WORD):
        return ""
    most = max(set(foreign), key=foreign.count)
    return f"{len(foreign)} of {len(letters)} letters are {most.title()}, not {scripts[0].title()}"
