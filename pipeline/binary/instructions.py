"""Which instruction sets of a CPU a program uses, read from the lines of `objdump`.

Names are those of /proc/cpuinfo. What every processor of a platform has (SSE2 on amd64, NEON on
arm64) has no name here. Sources: Intel's SDM volume 2 and Arm's A-profile reference, where each
instruction names the feature that it needs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import NamedTuple

AMD64, ARM64 = "linux/amd64", "linux/arm64"
# Debian's binutils have these names, native and for another processor.
_TOOLS = {AMD64: "x86_64-linux-gnu-objdump", ARM64: "aarch64-linux-gnu-objdump"}
_FILE = re.compile(r"^(\S.*):\s+file format ")

_X86_NAMES = {
    "pni": "addsubpd addsubps haddpd haddps hsubpd hsubps lddqu movddup movshdup movsldup fisttp",
    "ssse3": "pshufb phaddw phaddd phaddsw phsubw phsubd phsubsw pmaddubsw pmulhrsw psignb psignw"
    " psignd pabsb pabsw pabsd palignr",
    "sse4_1": "blendpd blendps blendvpd blendvps dppd dpps extractps insertps movntdqa mpsadbw"
    " packusdw pblendvb pblendw pcmpeqq pextrb pextrd pextrq phminposuw pinsrb pinsrd pinsrq pmaxsb"
    " pmaxsd pmaxud pmaxuw pminsb pminsd pminud pminuw pmovsxbw pmovsxbd pmovsxbq pmovsxwd pmovsxwq"
    " pmovsxdq pmovzxbw pmovzxbd pmovzxbq pmovzxwd pmovzxwq pmovzxdq pmuldq pmulld ptest roundpd"
    " roundps roundsd roundss",
    "sse4_2": "pcmpestri pcmpestrm pcmpistri pcmpistrm pcmpgtq crc32",
    "popcnt": "popcnt",
    # not tzcnt: compilers write it for all processors, as the older ones run it as bsf
    "abm": "lzcnt",
    "bmi1": "andn bextr blsi blsmsk blsr",
    "bmi2": "bzhi mulx pdep pext rorx sarx shlx shrx",
    "aes": "aesenc aesenclast aesdec aesdeclast aesimc aeskeygenassist",
    "pclmulqdq": "pclmulqdq pclmullqlqdq pclmulhqlqdq pclmullqhqdq pclmulhqhqdq",
    "sha_ni": "sha1rnds4 sha1nexte sha1msg1 sha1msg2 sha256rnds2 sha256msg1 sha256msg2",
    "gfni": "gf2p8affineqb gf2p8affineinvqb gf2p8mulb",
    "movbe": "movbe",
    "adx": "adcx adox",
    "rdrand": "rdrand",
    "rdseed": "rdseed",
    "amx_tile": "ldtilecfg sttilecfg tileloadd tileloaddt1 tilestored tilerelease tilezero",
    "amx_int8": "tdpbssd tdpbsud tdpbusd tdpbuud",
    "amx_bf16": "tdpbf16ps",
}
_X86 = {mnemonic: name for name, each in _X86_NAMES.items() for mnemonic in each.split()}
# objdump writes these before the instruction that they belong to
_X86_PREFIXES = frozenset(
    [
        *("{vex}", "{vex3}", "{evex}", "addr32", "data16", "cs", "ds", "es", "fs", "gs", "ss"),
        *("lock", "rep", "repz", "repnz", "notrack", "bnd"),
    ]
)
# bytes that may stand before an instruction's own first one
_X86_PREFIX_BYTES = frozenset(["26", "2e", "36", "3e", "64", "65", "67"])
_EVEX, _VEX = "62", ("c4", "c5")

# In order: the first that fits decides. Those with a suffix of b or w work on bytes or words.
_EVEX_SETS = {
    name: re.compile(pattern)
    for name, pattern in {
        "avx512_vnni": r"vpdp(busd|wssd)s?$",
        "avx512_bf16": r"vdpbf16ps$|vcvtne2?ps2bf16",
        "avx512_fp16": r"vmovw$|vcvtps2phx$|vcvtt?[ps]h2(?!ps$)|v(?!cvtps2ph$)\w+[ps]h$",
        "avx512vbmi": r"vperm(i2|t2)?b$|vpmultishiftqb$",
        "avx512_vbmi2": r"vp(compress|expand)[bw]$|vpsh[lr]dv?[wdq]$",
        "avx512_bitalg": r"vpopcnt[bw]$|vpshufbitqmb$",
        "avx512_vpopcntdq": r"vpopcnt[dq]$",
        "avx512ifma": r"vpmadd52",
        "avx512cd": r"vpconflict|vplzcnt|vpbroadcastm",
        "avx512_vp2intersect": r"vp2intersect",
        "vaes": r"vaes",
        "vpclmulqdq": r"vpclmul",
        "gfni": r"vgf2p8",
        "avx512dq": r"vpmullq$|vcvtt?p[sd]2u?qq$|vcvtu?qq2p[sd]|vfpclass|vrange|vreduce"
        r"|vpmov[dq]2m$|vpmovm2[dq]$|v(andn?|x?or)p[sd]$|v(insert|extract)[fi](64x2|32x8)$"
        r"|vbroadcast[fi](32x2|32x8|64x2)$|vp(extr|insr)[dq]$",
        "avx512bw": r"vpabs[bw]$|vp(add|sub)u?s?[bw]$|vpalignr$|vpavg|vpblendm[bw]$"
        r"|vpbroadcast[bw]$|vpcmp\w*[bw]$|vp(extr|insr)[bw]$|vpmadd(ubsw|wd)$|vp(max|min)[su][bw]$"
        r"|vpmov[bw]2m$|vpmovm2[bw]$|vpmovu?s?wb$|vpmov[sz]xbw$|vpmulhrsw$|vpmulhu?w$|vpmullw$"
        r"|v(p|db|dbp)sadbw$|vpshufb$|vpshuf[hl]w$|vps(ll|rl)dq$|vps(ll|ra|rl)v?w$|vptestn?m[bw]$"
        r"|vpunpck[hl](bw|wd)$|vmovdqu(8|16)$|vpack[us]s(dw|wb)$|vperm(i2|t2)?w$",
    }.items()
}
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
_ARM_SETS = {
    name: re.compile(pattern)
    for name, pattern in {
        "asimddp": r"[su]dot$",
        "i8mm": r"(s|u|us)mmla$|(us|su)dot$",
        "bf16": r"bf(dot|mmla|mlal[bt]|cvt)",
        "asimdfhm": r"fml[as]l2?$",
        "asimdrdm": r"sqrdml[as]h$",
        "fcma": r"fc(mla|add)$",
        "jscvt": r"fjcvtzs$",
        "aes": r"aes(e|d|mc|imc)$",
        "sha1": r"sha1",
        "sha2": r"sha256",
        "sha512": r"sha512",
        "sha3": r"(eor3|rax1|xar|bcax)$",
        "crc32": r"crc32",
        "lrcpc": r"ldapu?r",
        "sve": r"cnt[bhwd]$|rdvl$|addvl$",
        # no LSE atomics: gcc puts them into every program, with a choice at run time
    }.items()
}
_ARM_HALF = re.compile(r"(f(?!cvt([lnx]\w*)?$)|[su]cvtf$)")
_ARM_HALVES = re.compile(r"\.[48]h\b")
_ARM_ONE_HALF = re.compile(r"\bh\d+\b")

# What a processor with one of them always has as well.
_IMPLIED: Mapping[str, Sequence[str]] = {
    "ssse3": ["pni"],
    "sse4_1": ["ssse3"],
    "sse4_2": ["sse4_1", "popcnt"],
    "avx": ["sse4_2"],
    "avx2": ["avx"],
    "fma": ["avx"],
    "f16c": ["avx"],
    "avx_vnni": ["avx2"],
    "vaes": ["avx", "aes"],
    "vpclmulqdq": ["avx", "pclmulqdq"],
    "avx512f": ["avx2", "fma", "f16c"],
    **{
        name: ["avx512f"]
        for name in _EVEX_SETS
        if name.startswith("avx512") and name not in ("avx512_bf16", "avx512_fp16")
    },
    "avx512vl": ["avx512f"],
    "avx512_bf16": ["avx512bw"],
    "avx512_fp16": ["avx512bw", "avx512dq", "avx512vl"],
    "amx_int8": ["amx_tile"],
    "amx_bf16": ["amx_tile"],
    "fphp": ["asimdhp"],
    "asimdhp": ["fphp"],
    "sve": ["asimdhp"],
}


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
        """Take one line."""
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
    """Every instruction set that is looked for."""
    if platform == ARM64:
        return frozenset([*_ARM_SETS, "asimdhp", "fphp", "pmull"])
    wide = {"avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512vl"}
    return frozenset([*_X86_NAMES, *_EVEX_SETS, *wide])


def with_implied(names: Collection[str]) -> frozenset[str]:
    """Instruction sets, with those that come with them."""
    found, left = set[str](), list(names)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += _IMPLIED.get(name, ())
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
        # to copy one value from memory is of AVX, from a register of AVX2
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
        return (_mask(mask[1], mask[2]),)
    if re.match(r"vfn?m(add|sub)", mnemonic):
        return ("fma",)
    if mnemonic in ("vcvtph2ps", "vcvtps2ph"):
        return ("f16c",)
    if re.match(r"vpdp(busd|wssd)s?$", mnemonic):
        return ("avx_vnni",)
    if re.match(r"vgf2p8", mnemonic):
        return ("avx", "gfni")
    if re.match(r"v(aes|pclmul)", mnemonic):
        short, long = (
            ("aes", "vaes") if mnemonic.startswith("vaes") else ("pclmulqdq", "vpclmulqdq")
        )
        return (long,) if width else ("avx", short)
    long_integers = bool(width) and re.match(r"vp|vmpsadbw$|vmovntdqa$", mnemonic)
    if _AVX2.match(mnemonic) or (long_integers and not _AVX_LONG.match(mnemonic)):
        return ("avx2",)
    return ("avx",)


def _mask(verb: str, size: str) -> str:
    if size == "b" or (size == "w" and verb in ("add", "test")):
        return "avx512dq"
    return "avx512f" if size in ("w", "bw") else "avx512bw"


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
