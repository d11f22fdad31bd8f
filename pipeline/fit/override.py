"""`-ot` lines of llama.cpp and ik_llama.cpp: which tensor lies on which device, and the sums.

Both go through the rules in the order given and take the first whose regular expression matches
anywhere in the tensor's name (ik_llama.cpp: create_tensors_helper::get_context_for_tensor,
std::regex_search and break). What no rule names goes with its layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.fit.gguf import Tensor

CPU = "CPU"
# constructs of Python that std::regex (ECMAScript) does not have, or reads otherwise
_NOT_ECMA = re.compile(r"\(\?(?![:=!])|\\[AZ]|\\p|[*+?}]\+")
_LONGEST = 2000  # of one rule: a line for 60 layers has some 250 characters


@dataclass(frozen=True)
class TensorRule:
    """One rule."""

    pattern: str
    device: str

    def matches(self, tensor: str) -> bool:
        return re.search(self.pattern, tensor) is not None

    def flag(self) -> str:
        """As a shell takes it."""
        return f'-ot "{self.pattern}={self.device}"'


def read_overrides(texts: Iterable[str], devices: Iterable[str]) -> list[TensorRule]:
    """Rules as a user gives them, several in one with commas."""
    known = [*devices, CPU]
    rules = [_rule(text, known) for given in texts for text in given.split(",")]
    if not rules:
        raise ValueError("no rule was given")
    return rules


def _rule(text: str, known: list[str]) -> TensorRule:
    pattern, sign, device = text.strip().removeprefix("-ot ").strip("\"' ").partition("=")
    if not sign or not pattern or len(text) > _LONGEST:
        raise ValueError(f"{text!r} is not a rule; write it like exps=CPU")
    if device not in known:
        raise ValueError(f"{text!r}: there is no device {device!r} (only {', '.join(known)})")
    # a rule that only Python understands would match here and not in the engine
    if _NOT_ECMA.search(pattern):
        raise ValueError(f"{text!r}: the engine's regular expressions do not have this construct")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{text!r}: {error}") from error
    return TensorRule(pattern, device)


def home_of(tensor: str, layers: int, devices: list[str]) -> str:
    """Where -ngl 999 puts a tensor: layers in equal runs, the output with the last of them.

    The engine divides layers + 1 among the cards by their free memory (llama_model_load: splits);
    on cards of one size that is in equal parts. Token embeddings stay with the host.
    """
    if tensor.startswith("token_embd"):
        return CPU
    layer = re.match(r"blk\.(\d+)\.", tensor)
    # the output head and its norm count as one layer more
    place = int(layer[1]) if layer else layers
    return devices[min(place * len(devices) // (layers + 1), len(devices) - 1)]


def device_of(tensor: str, rules: list[TensorRule], layers: int, devices: list[str]) -> str:
    """Where a tensor lies: by the first rule that matches its name, else with its layer."""
    rule = next((r for r in rules if r.matches(tensor)), None)
    return rule.device if rule else home_of(tensor, layers, devices)


def device_sums(
    tensors: Iterable[Tensor], rules: list[TensorRule], layers: int, devices: list[str]
) -> dict[str, int]:
    """Bytes of weights on every device, by what the rules do and not by what was meant."""
    sums = dict.fromkeys([*devices, CPU], 0)
    for tensor in tensors:
        sums[device_of(tensor.name, rules, layers, devices)] += tensor.n_bytes
    return sums


def idle_rules(tensors: Iterable[Tensor], rules: list[TensorRule]) -> list[TensorRule]:
    """Rules that match no tensor, or only ones that an earlier rule has taken."""
    working = {
        next((i for i, rule in enumerate(rules) if rule.matches(tensor.name)), None)
        for tensor in tensors
    }
    return [rule for i, rule in enumerate(rules) if i not in working]
