from __future__ import annotations

import pytest

from pipeline.artifacts.binary.instructions import (
    AMD64,
    ARM64,
    InstructionReader,
    disassembler,
    known_features,
    with_implied,
)

# Assembled by gas 2.40 and printed by objdump 2.40: code, text, and what Intel's and Arm's manuals
# say that it needs beyond what every processor of the platform has.
X86 = """
0f 58 c1 | addps xmm0,xmm1 |
66 0f fe c1 | paddd xmm0,xmm1 |
f3 0f bc c0 | tzcnt eax,eax |
f0 0f b1 07 | lock cmpxchg DWORD PTR [rdi],eax |
f3 aa | rep stos BYTE PTR es:[rdi],al |
0f 00 e8 | verw ax |
f3 0f 1e fa | endbr64 |
c5 f4 47 c9 | kxorw k1,k1,k1 | avx512f
f2 0f 7c c1 | haddps xmm0,xmm1 | pni
66 0f 38 00 c1 | pshufb xmm0,xmm1 | ssse3
66 0f 38 40 c1 | pmulld xmm0,xmm1 | sse4_1
66 0f 38 37 c1 | pcmpgtq xmm0,xmm1 | sse4_2
f2 0f 38 f0 c3 | crc32 eax,bl | sse4_2
f3 0f b8 c3 | popcnt eax,ebx | popcnt
f3 0f bd c3 | lzcnt eax,ebx | abm
c4 e2 60 f2 c1 | andn eax,ebx,ecx | bmi1
c4 e2 71 f7 c3 | shlx eax,ebx,ecx | bmi2
66 0f 38 dc c1 | aesenc xmm0,xmm1 | aes
66 0f 3a 44 c1 11 | pclmulhqhqdq xmm0,xmm1 | pclmulqdq
0f 38 cb c1 | sha256rnds2 xmm0,xmm1,xmm0 | sha_ni
0f 38 f0 07 | movbe eax,DWORD PTR [rdi] | movbe
66 0f 38 f6 c3 | adcx eax,ebx | adx
0f c7 f0 | rdrand eax | rdrand
c5 f4 58 c2 | vaddps ymm0,ymm1,ymm2 | avx
c5 f1 fe c2 | vpaddd xmm0,xmm1,xmm2 | avx
c5 f5 fe c2 | vpaddd ymm0,ymm1,ymm2 | avx2
c4 e2 7d 17 c1 | vptest ymm0,ymm1 | avx
c4 e3 7d 04 c1 01 | vpermilps ymm0,ymm1,0x1 | avx
c4 e3 75 06 c2 01 | vperm2f128 ymm0,ymm1,ymm2,0x1 | avx
c4 e2 79 58 c1 | vpbroadcastd xmm0,xmm1 | avx2
c4 e2 7d 18 07 | vbroadcastss ymm0,DWORD PTR [rdi] | avx
c4 e2 7d 18 c1 | vbroadcastss ymm0,xmm1 | avx2
c4 e3 7d 39 c8 01 | vextracti128 xmm0,ymm1,0x1 | avx2
c4 e2 75 b8 c2 | vfmadd231ps ymm0,ymm1,ymm2 | fma
c4 e2 7d 13 c1 | vcvtph2ps ymm0,xmm1 | f16c
c4 e2 75 50 c2 | {vex} vpdpbusd ymm0,ymm1,ymm2 | avx_vnni
c4 e2 71 dc c2 | vaesenc xmm0,xmm1,xmm2 | avx aes
c4 e2 75 dc c2 | vaesenc ymm0,ymm1,ymm2 | vaes
62 f1 74 48 58 c2 | vaddps zmm0,zmm1,zmm2 | avx512f
62 f1 75 48 fc c2 | vpaddb zmm0,zmm1,zmm2 | avx512bw
62 f1 75 48 fe c2 | vpaddd zmm0,zmm1,zmm2 | avx512f
62 e1 75 28 fe c2 | vpaddd ymm16,ymm1,ymm2 | avx512f avx512vl
62 e1 75 28 fd c2 | vpaddw ymm16,ymm1,ymm2 | avx512bw avx512vl
62 e1 76 08 58 c2 | vaddss xmm16,xmm1,xmm2 | avx512f
62 e1 7e 08 10 07 | vmovss xmm16,DWORD PTR [rdi] | avx512f
62 f2 f5 48 40 c2 | vpmullq zmm0,zmm1,zmm2 | avx512dq
62 f1 74 48 54 c2 | vandps zmm0,zmm1,zmm2 | avx512dq
62 f2 75 48 50 c2 | vpdpbusd zmm0,zmm1,zmm2 | avx512_vnni
62 f2 76 48 52 c2 | vdpbf16ps zmm0,zmm1,zmm2 | avx512_bf16
62 f5 74 48 58 c2 | vaddph zmm0,zmm1,zmm2 | avx512_fp16
62 f2 75 48 8d c2 | vpermb zmm0,zmm1,zmm2 | avx512vbmi
62 f2 7d 48 55 c1 | vpopcntd zmm0,zmm1 | avx512_vpopcntdq
62 f2 7d 48 54 c1 | vpopcntb zmm0,zmm1 | avx512_bitalg
62 f2 75 48 71 c2 | vpshldvd zmm0,zmm1,zmm2 | avx512_vbmi2
62 f2 f5 48 b4 c2 | vpmadd52luq zmm0,zmm1,zmm2 | avx512ifma
62 f2 7d 48 c4 c1 | vpconflictd zmm0,zmm1 | avx512cd
62 f3 7d 48 1d c8 00 | vcvtps2ph ymm0,zmm1,0x0 | avx512f
62 f2 7d 48 13 c1 | vcvtph2ps zmm0,ymm1 | avx512f
c5 f8 92 c8 | kmovw k1,eax | avx512f
c5 fb 92 c8 | kmovd k1,eax | avx512bw
c5 f9 92 c8 | kmovb k1,eax | avx512dq
c5 ed 4b cb | kunpckbw k1,k2,k3 | avx512f
62 f1 75 48 74 ca | vpcmpeqb k1,zmm1,zmm2 | avx512bw
62 f1 75 48 76 ca | vpcmpeqd k1,zmm1,zmm2 | avx512f
62 f2 7e 48 31 0f | vpmovdb XMMWORD PTR [rdi],zmm1 | avx512f
62 f2 7e 48 30 0f | vpmovwb YMMWORD PTR [rdi],zmm1 | avx512bw
62 f1 7f 48 6f 07 | vmovdqu8 zmm0,ZMMWORD PTR [rdi] | avx512bw
62 f1 7e 48 6f 07 | vmovdqu32 zmm0,ZMMWORD PTR [rdi] | avx512f
62 e1 fe 08 6f 07 | vmovdqu64 xmm16,XMMWORD PTR [rdi] | avx512f avx512vl
62 f2 7d 48 5b 07 | vbroadcasti32x8 zmm0,YMMWORD PTR [rdi] | avx512dq
62 f3 f5 48 3a c2 01 | vinserti64x4 zmm0,zmm1,ymm2,0x1 | avx512f
62 f1 74 49 5f c2 | vmaxps zmm0{k1},zmm1,zmm2 | avx512f
c4 e2 6b 5e c1 | tdpbssd tmm0,tmm1,tmm2 | amx_int8
62 e1 f6 08 2a c0 | vcvtsi2ss xmm16,xmm1,rax | avx512f
62 f1 75 48 f6 c2 | vpsadbw zmm0,zmm1,zmm2 | avx512bw
62 f1 7d 48 73 f9 01 | vpslldq zmm0,zmm1,0x1 | avx512bw
62 f1 7d 48 71 f1 01 | vpsllw zmm0,zmm1,0x1 | avx512bw
62 f1 7d 48 72 f1 01 | vpslld zmm0,zmm1,0x1 | avx512f
62 f1 75 48 6b c2 | vpackssdw zmm0,zmm1,zmm2 | avx512bw
62 f2 7d 48 30 c1 | vpmovzxbw zmm0,ymm1 | avx512bw
62 f2 7d 48 31 c1 | vpmovzxbd zmm0,xmm1 | avx512f
62 f3 7d 48 39 c8 01 | vextracti32x4 xmm0,zmm1,0x1 | avx512f
62 f2 f5 48 8d c2 | vpermw zmm0,zmm1,zmm2 | avx512bw
62 f2 75 48 36 c2 | vpermd zmm0,zmm1,zmm2 | avx512f
c4 e2 6d 90 04 8f | vpgatherdd ymm0,DWORD PTR [rdi+ymm1*4],ymm2 | avx2
"""
ARM = """
4e22d420 | fadd v0.4s, v1.4s, v2.4s |
4e22cc20 | fmla v0.4s, v1.4s, v2.4s |
1ee24000 | fcvt s0, h0 |
0e217820 | fcvtl v0.4s, v1.4h |
0e216820 | fcvtn v0.4h, v1.4s |
7d400000 | ldr h0, [x0] |
4e629c20 | mul v0.8h, v1.8h, v2.8h |
b8200041 | ldadd w0, w1, [x2] |
88e0fc41 | casal w0, w1, [x2] |
1ac20820 | udiv w0, w1, w2 |
90000000 | adrp x0, 0 <.text> |
d65f03c0 | ret |
d503233f | paciasp |
4e829420 | sdot v0.4s, v1.16b, v2.16b | asimddp
6f82e020 | udot v0.4s, v1.16b, v2.4b[0] | asimddp
4e82a420 | smmla v0.4s, v1.16b, v2.16b | i8mm
4e829c20 | usdot v0.4s, v1.16b, v2.16b | i8mm
6e42fc20 | bfdot v0.4s, v1.8h, v2.8h | bf16
1e634000 | bfcvt h0, s0 | bf16
4e22ec20 | fmlal v0.4s, v1.4h, v2.4h | asimdfhm
6e428420 | sqrdmlah v0.8h, v1.8h, v2.8h | asimdrdm
6e82cc20 | fcmla v0.4s, v1.4s, v2.4s, #90 | fcma
4e421420 | fadd v0.8h, v1.8h, v2.8h | asimdhp
4e420c20 | fmla v0.8h, v1.8h, v2.8h | asimdhp
4e79d820 | scvtf v0.8h, v1.8h | asimdhp
4ef9b820 | fcvtzs v0.8h, v1.8h | asimdhp
1ee22820 | fadd h0, h1, h2 | fphp
1fc20c20 | fmadd h0, h1, h2, h3 | fphp
1ee70000 | fmov h0, w0 | fphp
4e284820 | aese v0.16b, v1.16b | aes
0ee2e020 | pmull v0.1q, v1.1d, v2.1d | pmull
0e22e020 | pmull v0.8h, v1.8b, v2.8b |
5e024020 | sha256h q0, q1, v2.4s | sha2
ce020c20 | eor3 v0.16b, v1.16b, v2.16b, v3.16b | sha3
b8bfc020 | ldapr w0, [x1] | lrcpc
2518e3e0 | ptrue p0.b | sve
04a20020 | add z0.s, z1.s, z2.s | sve
a540a000 | ld1w {z0.s}, p0/z, [x0] | sve
04a0e3e0 | cntw x0 | sve
"""


def reader_of(platform: str, *rows: str) -> InstructionReader:
    reader = InstructionReader(platform)
    reader.see("bin/hello:     file format elf64")
    for number, row in enumerate(rows):
        code, text, *_ = row.split(" | ")
        text = text if platform == AMD64 else text.replace(" ", "\t", 1)
        reader.see(f"  {number:x}:\t{code} \t{text}")
    return reader


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


@pytest.mark.parametrize(
    ("platform", "row"), [*((AMD64, x) for x in lines(X86)), *((ARM64, x) for x in lines(ARM))]
)
def test_an_instruction_needs_what_the_manual_says(platform: str, row: str) -> None:
    want = row.split("|")[2].split()
    assert sorted(reader_of(platform, row).used) == sorted(want)


@pytest.mark.parametrize(("platform", "text"), [(AMD64, X86), (ARM64, ARM)])
def test_what_can_be_found_can_be_named(platform: str, text: str) -> None:
    assert set(reader_of(platform, *lines(text)).used) <= known_features(platform)


def test_the_first_use_is_told_with_file_and_address_and_all_are_counted() -> None:
    row = "62 f1 74 48 58 c2 | vaddps zmm0,zmm1,zmm2"
    reader = reader_of(AMD64, "0f 58 c1 | addps  xmm0,xmm1", row, row)
    assert str(reader.first["avx512f"]) == "bin/hello: 1: vaddps zmm0,zmm1,zmm2"
    assert (reader.used["avx512f"], reader.instructions) == (2, 3)


def test_what_stands_between_instructions_is_none() -> None:
    reader = InstructionReader(AMD64)
    for line in ("", "bin/a:     file format elf64-x86-64", "Disassembly of section .text:"):
        reader.see(line)
    reader.see("0000000000001000 <vaddps_zmm>:")
    reader.see("\t...")
    assert (reader.files, reader.instructions, reader.used.total()) == (["bin/a"], 0, 0)


def test_a_prefix_does_not_hide_an_instruction() -> None:
    rows = ["64 62 f1 75 48 fe 07 | fs vpaddd zmm0,zmm1,[rdi]", "67 c5 f4 58 07 | addr32 vaddps x"]
    assert set(reader_of(AMD64, *rows).used) == {"avx512f", "avx"}
    assert not reader_of(AMD64, "f0 | lock", "48 | rex.W").used


def test_what_a_processor_always_has_as_well_is_implied_and_nothing_else() -> None:
    assert {"avx", "sse4_2", "popcnt", "pni"} < with_implied(["avx2"])
    assert not {"fma", "avx512f", "bmi2", "abm"} & with_implied(["avx2"])
    assert {"avx512f", "avx2", "fma"} < with_implied(["avx512bw"])
    assert not {"avx512vl", "avx512dq"} & with_implied(["avx512bw"])
    assert with_implied([]) == frozenset()


def test_each_platform_has_its_own_disassembler() -> None:
    assert disassembler(AMD64)[0] != disassembler(ARM64)[0]
    assert "intel" in disassembler(AMD64)
