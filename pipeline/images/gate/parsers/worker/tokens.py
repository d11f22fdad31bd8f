"""A tokenizer with one token for each byte and one for each marker of a model's format.

Parsers ask which id a marker has and what an id decodes to, so any ids will do. Bytes are the
finest pieces that a byte-level tokenizer can produce; a longer token is a step of several bytes.
An engine that reads tokens by a package with a vocabulary of its own gets that vocabulary's ids.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any, ClassVar, NamedTuple

END = "<|end|>"  # of an answer whose format names no token for it
_WORD = re.compile(rb" ?[A-Za-z0-9_]+|[^A-Za-z0-9_]")


class ByteToken(NamedTuple):
    """What one token adds to an answer; a character of several bytes comes with its last."""

    id: int
    text: str


class ByteTokenizer:
    """What engines ask of a tokenizer, as far as their parsers use it."""

    def __init__(
        self,
        markers: dict[str, bool],
        end: str = "",
        ids: Mapping[str, int] | None = None,
        order: bytes = bytes(range(256)),
    ) -> None:
        """`markers`: text → whether the model's tokenizer lists it as a special token.

        `end` stops an answer, `ids` are those of markers, `order` has the byte of each of the first
        256 ids.
        """
        known = {**markers, (end or END): True}
        self._ids = dict(ids or {text: 256 + i for i, text in enumerate(known)})
        self._bytes = {i: text for text, i in self._ids.items()}
        self._order, self._places = order, bytes(map(order.index, range(256)))
        self.all_special_tokens = [text for text, is_special in known.items() if is_special]
        self.all_special_ids = [self._ids[text] for text in self.all_special_tokens]
        self.eos_token_id, self.eos_token = self._ids[end or END], end or END
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
        return {**{f"<0x{byte:02X}>": i for i, byte in enumerate(self._order)}, **self._ids}

    def get_added_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        ids, at = [], 0
        for match in self._split.finditer(text):
            ids += [*self._numbered(text[at : match.start()]), self._ids[match[0]]]
            at = match.end()
        return [*ids, *self._numbered(text[at:])]

    def _numbered(self, text: str) -> bytes:
        return text.encode().translate(self._places)

    def decode(self, ids: Any, *args: Any, **kwargs: Any) -> str:
        ids = [ids] if isinstance(ids, int) else list(ids)
        return b"".join(
            self._bytes[i].encode() if i in self._bytes else self._order[i : i + 1] for i in ids
        ).decode(errors="replace")

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
            held += self._order[i : i + 1]
            try:
                tokens.append(ByteToken(i, held.decode()))
                held = b""
            except UnicodeDecodeError:
                tokens.append(ByteToken(i, ""))  # the rest of the character is still to come
        return tokens

    def ids(self, step: list[ByteToken]) -> list[int]:
        """The ids of a step as an engine gets them."""
        return [token.id for token in step]

    def words(self, tokens: list[ByteToken]) -> list[int]:
        """Steps of the size that a trained tokenizer's tokens have: words, and markers."""
        sizes: list[int] = []
        plain = b""
        for token in tokens:
            if token.id < 256:
                plain += self._order[token.id : token.id + 1]
                continue
            sizes += [len(word) for word in _WORD.findall(plain)]
            sizes.append(1)
            plain = b""
        return [*sizes, *(len(word) for word in _WORD.findall(plain))]


class HarmonyTokenizer(ByteTokenizer):
    """Bytes and markers by the ids of gpt-oss, which vLLM reads by `openai_harmony` alone.

    A step of several bytes holds the vocabulary's own tokens: its parser sees one at a time.
    """

    _encoding: ClassVar[Any] = None

    def __init__(self, markers: dict[str, bool], end: str) -> None:
        if HarmonyTokenizer._encoding is None:
            package: Any = importlib.import_module("openai_harmony")
            HarmonyTokenizer._encoding = package.load_harmony_encoding("HarmonyGptOss")
        ids = dict[str, int]()
        for text in (*markers, end):
            # of a text that is no token of its own there are several
            (ids[text],) = self._encoding.encode(text, allowed_special="all")
        order = bytes(self._encoding._inner.decode_bytes(list(range(256))))
        super().__init__(markers, end, ids, order)

    def decode(self, ids: Any, *args: Any, **kwargs: Any) -> str:
        return str(self._encoding.decode([ids] if isinstance(ids, int) else list(ids)))

    def ids(self, step: list[ByteToken]) -> list[int]:
        ids = list[int]()
        for is_plain, tokens in groupby(step, lambda token: token.id < 256):
            single = [token.id for token in tokens]
            try:
                plain = bytes(single).translate(self._order).decode() if is_plain else ""
            except UnicodeDecodeError:  # a character that the step cuts
                plain = ""
            ids += self._encoding.encode(plain, disallowed_special=()) if plain else single
        return ids


TOKENIZERS = {"": ByteTokenizer, "openai_harmony": HarmonyTokenizer}
