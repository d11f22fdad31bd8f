"""A tokenizer with one token for each byte and one for each marker of a model's format.

Parsers ask which id a marker has and what an id decodes to, so any ids will do. Bytes are the
finest pieces that a byte-level tokenizer can produce; a longer token is a step of several bytes.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

END = "<|end|>"  # of every answer; no format has a marker of this name
_WORD = re.compile(rb" ?[A-Za-z0-9_]+|[^A-Za-z0-9_]")


class ByteToken(NamedTuple):
    """What one token adds to an answer; a character of several bytes comes with its last."""

    id: int
    text: str


class ByteTokenizer:
    """What engines ask of a tokenizer, as far as their parsers use it."""

    def __init__(self, markers: dict[str, bool]) -> None:
        """`markers`: text → whether the model's tokenizer lists it as a special token."""
        known = {**markers, END: True}
        self._bytes = {256 + i: text for i, text in enumerate(known)}
        self._ids = {text: i for i, text in self._bytes.items()}
        self.all_special_tokens = [text for text, is_special in known.items() if is_special]
        self.all_special_ids = [self._ids[text] for text in self.all_special_tokens]
        self.eos_token_id, self.eos_token = self._ids[END], END
        self.bos_token_id = self.bos_token = self.chat_template = None
        self.is_fast = True
        self.name_or_path = "stand-in"
        self.vocab_size = self.max_token_id = len(self.get_vocab())
        longest_first = sorted(known, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first)))

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def backend_tokenizer(self) -> ByteTokenizer:
        """Some engines hand the tokenizer's file to a parser that is not Python."""
        return self

    def to_str(self) -> str:
        """The same tokens as a `tokenizer.json`."""
        # byte-level files write each byte as a letter: the printable ones as themselves
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        other = iter(range(256, 512))
        letters = {chr(i if i in shown else next(other)): i for i in range(256)}
        level = {"type": "ByteLevel", "add_prefix_space": False}
        level |= {"trim_offsets": False, "use_regex": False}
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = [
            {"id": i, "content": text, "special": text in self.all_special_tokens, **plain}
            for i, text in self._bytes.items()
        ]
        model = {"type": "BPE", "vocab": letters, "merges": []}
        whole = {"version": "1.0", "added_tokens": added, "model": model}
        return json.dumps({**whole, "pre_tokenizer": level, "decoder": level})

    def get_vocab(self) -> dict[str, int]:
        """Markers by their text; bytes by names that no marker has."""
        return {**{f"<0x{i:02X}>": i for i in range(256)}, **self._ids}

    def get_added_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        ids, at = [], 0
        for match in self._split.finditer(text):
            ids += [*text[at : match.start()].encode(), self._ids[match[0]]]
            at = match.end()
        return [*ids, *text[at:].encode()]

    def decode(self, ids: Any, *args: Any, **kwargs: Any) -> str:
        ids = [ids] if isinstance(ids, int) else list(ids)
        data = b"".join(self._bytes[i].encode() if i in self._bytes else bytes([i]) for i in ids)
        return data.decode(errors="replace")

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        vocab = self.get_vocab()
        return vocab.get(tokens) if isinstance(tokens, str) else [vocab.get(t) for t in tokens]

    def convert_ids_to_tokens(self, ids: Any, *args: Any, **kwargs: Any) -> Any:
        names = {i: text for text, i in self.get_vocab().items()}
        return names[ids] if isinstance(ids, int) else [names[i] for i in ids]

    def tokens(self, text: str) -> list[ByteToken]:
        """An answer as the engine's detokenizer hands it on."""
        held, tokens = b"", []
        for i in self.encode(text):
            if i in self._bytes:
                tokens.append(ByteToken(i, self._bytes[i]))
                continue
            held += bytes([i])
            try:
                tokens.append(ByteToken(i, held.decode()))
                held = b""
            except UnicodeDecodeError:
                tokens.append(ByteToken(i, ""))  # the rest of the character is still to come
        return tokens

    def words(self, tokens: list[ByteToken]) -> list[int]:
        """Steps of the size that a trained tokenizer's tokens have: words, and markers."""
        sizes: list[int] = []
        plain = b""
        for token in tokens:
            if token.id < 256:
                plain += bytes([token.id])
                continue
            sizes += [len(word) for word in _WORD.findall(plain)]
            sizes.append(1)
            plain = b""
        return [*sizes, *(len(word) for word in _WORD.findall(plain))]
