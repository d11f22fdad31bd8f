"""Which instruction sets of a CPU a program uses, read from the lines of `objdump`.

Names are those of /proc/cpuinfo; `instruction_sets.toml` lists them. Instructions that every
processor of a platform has (SSE2 on amd64, NEON on arm64) need none.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

AMD64, ARM64 = "linux/amd64", "linux/arm64"
# Debian's binutils have these names, native and for another processor.
_TOOLS = {AMD64: "x86_64-linux-gnu-objdump", ARM64: "aarch64-linux-gnu-objdump"}
_FILE = re.compile(r"^(\S.*):\s+file format ")
_SETS = tomllib.loads(Path(__file__).with_name("instruction_sets.toml").read_text("utf-8"))
_X86 = {word: name for name, text in _SETS["x86"]["names"].items() for word in text.split()}
_EVEX_SETS, _VEX_SETS, _ARM_SETS = (
    {name: re.compile("|".join(patterns)) for name, patterns in table.items()}
    for table in (_SETS["x86"]["evex"], _SETS["x86"]["vex"], _SETS["arm"]["names"])
)
_X86_PREFIXES = frozenset(_SETS["x86"]["prefixes"].split())
# bytes that may stand before an instruction's own first one
_X86_PREFIX_BYTES = frozenset(["26", "2e", "36", "3e", "64", "65", "67"])
_EVEX, _VEX = "62", ("c4", "c5")
_MASKS = re.compile(r"k(add|andn?|mov|not|or|ortest|shift[lr]|test|unpck|xnor|xor)([bwdq]+)$")
# one value or a part of one register: these need nothing for shorter vectors
_SCALAR = re.compile(
    r"v\w+(ss|sd|si|usi)$|v(mov|pextr|pinsr)[bwdq]$|v(extract|insert)ps$|vmov[hl]p[sd]$"
    r"|vmov(hl|lh)ps$|vcvtu?si2s[sd]$"
)
_AVX2 = re.compile(
    r"vpbroadcast|vpblendd$|vps(ll|rl|ra)v[dq]$|vpmaskmov|vp?gather|v(broadcast|extract|insert)i128$"
    r"|vperm(2i128|d|ps|pd|q)$"
)
_AVX_LONG = re.compile(r"vpermil|vperm2f128$|vptest$")  # of 256 bits, and not of AVX2

_SVE = re.compile(r"\bz\d+\b|\bp\d+(/[mz]|\.[bhsd])")
_ARM_HALF = re.compile(r"(f(?!cvt([lnx]\w*)?$)|[su]cvtf$)")
_ARM_HALVES = re.compile(r"\.[48]h\b")
_ARM_ONE_HALF = re.compile(r"\bh\d+\b")


class Use(NamedTuple):
    """One instruction, and where it is."""

    file: str
    address: str
    instruction: str

    def __str__(self) -> str:
        return f"{self.file}: {self.address}: {self.instruction}"


class InstructionReader:
    """Takes the lines of `objdump` one by one and remembers which instruction sets they need."""

    def __init__(self, platform: str) -> None:
        self._needs = _READERS[platform]
        self._file = ""
        self.files: list[str] = []
        self.instructions = 0
        self.used: Counter[str] = Counter()
        self.first: dict[str, Use] = {}

    def see(self, line: str) -> None:
        """Takes one line."""
        parts = line.split("\t", 2)
        if len(parts) < 3:
            if found := _FILE.match(line):
                self._file = found[1]
                self.files.append(self._file)
            return
        self.instructions += 1
        address, code, text = parts
        mnemonic, _, operands = text.replace("\t", " ", 1).partition(" ")
        for name in self._needs(code, mnemonic, operands):
            self.used[name] += 1
            if name not in self.first:
                place = address.strip().removesuffix(":")
                self.first[name] = Use(self._file, place, " ".join(text.split()))


def disassembler(platform: str) -> list[str]:
    """The command that writes the lines, without the files to read."""
    # one line for each instruction, and names of instructions without the size of their operands
    style = ["-M", "intel"] if platform == AMD64 else []
    return [_TOOLS[platform], "--disassemble", "--wide", *style]


def known_features(platform: str) -> frozenset[str]:
    """Every instruction set that the reader looks for."""
    if platform == ARM64:
        return frozenset([*_ARM_SETS, "asimdhp", "fphp", "pmull"])
    wide = {"avx", "avx2", "avx512f", "avx512vl"}
    return frozenset([*_SETS["x86"]["names"], *_EVEX_SETS, *_VEX_SETS, *wide])


def with_implied(names: Collection[str]) -> frozenset[str]:
    """Instruction sets, with those that come with them."""
    found, todo = set[str](), list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += _SETS["implied"].get(name, ())
    return frozenset(found)


def _x86(code: str, mnemonic: str, operands: str) -> Sequence[str]:
    while mnemonic in _X86_PREFIXES or mnemonic.startswith("rex"):
        if not operands:
            return ()
        mnemonic, _, operands = operands.strip().partition(" ")
    if name := _X86.get(mnemonic):
        return (name,)
    if mnemonic[:1] not in ("v", "k"):
        return ()
    first = next((byte for byte in code.split() if byte not in _X86_PREFIX_BYTES), "")
    width = "zmm" if "zmm" in operands else "ymm" if "ymm" in operands.lower() else ""
    if first == _EVEX:
        return _evex(mnemonic, width)
    if first in _VEX:
        # AVX can copy one value from memory, only AVX2 from a register
        from_register = mnemonic in ("vbroadcastss", "vbroadcastsd") and "[" not in operands
        return ("avx2",) if from_register else _vex(mnemonic, width)
    return ()  # such as verw


@cache
def _evex(mnemonic: str, width: str) -> Sequence[str]:
    own = next((name for name, pattern in _EVEX_SETS.items() if pattern.match(mnemonic)), "avx512f")
    is_short = width != "zmm" and not _SCALAR.match(mnemonic)
    return (own, "avx512vl") if is_short else (own,)


@cache
def _vex(mnemonic: str, width: str) -> Sequence[str]:
    if mask := _MASKS.match(mnemonic):
        verb, size = mask.groups()
        if size == "b" or (size == "w" and verb in ("add", "test")):
            return ("avx512dq",)
        return ("avx512f",) if size in ("w", "bw") else ("avx512bw",)
    if re.match(r"v(aes|pclmul)", mnemonic):
        is_aes = mnemonic.startswith("vaes")
        short, long = ("aes", "vaes") if is_aes else ("pclmulqdq", "vpclmulqdq")
        return (long,) if width else ("avx", short)
    for name, pattern in _VEX_SETS.items():
        if pattern.match(mnemonic):
            return (name,)
    if mnemonic.startswith("vgf2p8"):
        return ("avx", "gfni")
    long_integers = bool(width) and re.match(r"vp|vmpsadbw$|vmovntdqa$", mnemonic)
    is_avx2 = _AVX2.match(mnemonic) or (long_integers and not _AVX_LONG.match(mnemonic))
    return ("avx2",) if is_avx2 else ("avx",)


def _arm(code: str, mnemonic: str, operands: str) -> Sequence[str]:
    if _SVE.search(operands):
        return ("sve",)
    for name, pattern in _ARM_SETS.items():
        if pattern.match(mnemonic):
            return (name,)
    if mnemonic.startswith("pmull") and ".1q" in operands:
        return ("pmull",)
    if _ARM_HALF.match(mnemonic):
        if _ARM_HALVES.search(operands):
            return ("asimdhp",)
        if _ARM_ONE_HALF.search(operands):
            return ("fphp",)
    return ()


_READERS: Mapping[str, Callable[[str, str, str], Sequence[str]]] = {AMD64: _x86, ARM64: _arm}
