"""The types tensors have in GGUF files: mainline's and those of ik_llama.cpp.

Numbers and sizes as both projects' gguf-py has them (GGMLQuantizationType, GGML_QUANT_SIZES).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgmlType:
    """So many values in a block of so many bytes."""

    name: str
    values: int
    n_bytes: int
    row_scaled: bool = False  # a few bytes more for each row; the file's own offsets show how many

    def size(self, weights: int) -> int:
        """Bytes of that many weights, without what rows may carry."""
        return weights // self.values * self.n_bytes  # a row is a whole number of blocks


_MAINLINE = """
    0 f32 1 4; 1 f16 1 2; 2 q4_0 32 18; 3 q4_1 32 20; 6 q5_0 32 22; 7 q5_1 32 24; 8 q8_0 32 34;
    10 q2_k 256 84; 11 q3_k 256 110; 12 q4_k 256 144; 13 q5_k 256 176; 14 q6_k 256 210;
    16 iq2_xxs 256 66; 17 iq2_xs 256 74; 18 iq3_xxs 256 98; 19 iq1_s 256 50; 20 iq4_nl 32 18;
    21 iq3_s 256 110; 22 iq2_s 256 82; 23 iq4_xs 256 136; 24 i8 1 1; 25 i16 1 2; 26 i32 1 4;
    27 i64 1 8; 28 f64 1 8; 29 iq1_m 256 56; 30 bf16 1 2; 34 tq1_0 256 54; 35 tq2_0 256 66;
    39 mxfp4 32 17; 40 nvfp4 64 36; 41 q1_0 128 18
"""
_IK = """
    133 q6_0 32 26; 137 iq2_k 256 76; 138 iq3_k 256 110; 139 iq4_k 256 144; 140 iq5_k 256 176;
    141 iq6_k 256 212; 202 q4_0_r8 32 18; 206 q5_0_r4 32 22; 208 q8_0_r8 32 34; 210 q2_k_r4 256 84;
    211 q3_k_r4 256 110; 212 q4_k_r4 256 144; 213 q5_k_r4 256 176; 214 q6_k_r4 256 210;
    216 iq2_xxs_r4 256 66; 217 iq2_xs_r4 256 74; 218 iq3_xxs_r4 256 98; 220 iq4_nl_r4 32 18;
    221 iq3_s_r4 256 110; 222 iq2_s_r4 256 82; 223 iq4_xs_r8 256 136; 230 bf16_r16 1 2;
    233 q6_0_r4 32 26; 337 iq2_k_r4 256 76; 338 iq3_k_r4 256 110; 339 iq4_k_r4 256 144;
    340 iq5_k_r4 256 176
"""
_IK_ROW_SCALED = """
    144 iq4_ks 256 136; 145 iq2_ks 256 70; 146 iq4_kss 256 128; 152 iq5_ks 256 168;
    153 iq2_kt 256 68; 154 iq3_kt 256 100; 155 iq4_kt 256 128; 156 iq3_ks 256 102;
    157 iq2_kl 256 86; 158 iq1_kt 256 56; 219 iq1_s_r4 32 6; 229 iq1_m_r4 32 7;
    344 iq4_ks_r4 256 136; 352 iq5_ks_r4 256 168
"""


def _read(table: str, *, row_scaled: bool = False) -> dict[int, GgmlType]:
    rows = (row.split() for row in table.split(";"))
    return {int(n): GgmlType(name, int(v), int(b), row_scaled) for n, name, v, b in rows}


BY_NUMBER = _read(_MAINLINE) | _read(_IK) | _read(_IK_ROW_SCALED, row_scaled=True)
BY_NAME = {kind.name: kind for kind in BY_NUMBER.values()}
