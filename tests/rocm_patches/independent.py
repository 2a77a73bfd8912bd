"""DeepSeek-V4's number formats, page layouts and rotation stated a second time, for the tests only.

Slow and literal on purpose: Python floats, float64 and loops, from the formats' definitions. Nothing here
imports rocm_patches, so an error there cannot hide behind the same error here.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

BIAS = {"ocp": 7, "fnuz": 8}
LIMIT = {"ocp": 448.0, "fnuz": 224.0}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIN_AMAX = 1e-4
# Largest relative error of one rounding to bf16 (8 significant bits).
BF16 = 2.0**-8


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=generator(seed)) * scale).to(dtype)


# --- numbers ----------------------------------------------------------------------------------------


def e4m3_value(byte: int, dialect: str) -> float:
    """Value of one byte S EEEE MMM: (8 + M) * 2^(E - bias - 3), or M * 2^(1 - bias - 3) where E is 0."""
    if (dialect == "ocp" and byte & 0x7F == 0x7F) or (dialect == "fnuz" and byte == 0x80):
        return math.nan
    exponent, mantissa = (byte >> 3) & 0xF, byte & 7
    if exponent == 0:
        magnitude = math.ldexp(mantissa, 1 - BIAS[dialect] - 3)
    else:
        magnitude = math.ldexp(8 + mantissa, exponent - BIAS[dialect] - 3)
    return -magnitude if byte & 0x80 else magnitude


def e4m3_values(dialect: str) -> Tensor:
    """The values of all 256 bytes, float64."""
    return torch.tensor([e4m3_value(byte, dialect) for byte in range(256)], dtype=torch.float64)


def nearest_code(magnitude: Tensor, grid: Tensor) -> Tensor:
    """Brute force: index of the closest of all grid values; of two equally close ones, the even index."""
    distance = (magnitude.double().unsqueeze(-1) - grid.double()).abs()
    closest = distance == distance.amin(-1, keepdim=True)
    return torch.where(closest, torch.arange(len(grid)) % 2, 2).argmin(-1)


def nearest_e4m3(x: Tensor, dialect: str) -> Tensor:
    """Bytes of the closest e4m3 values with a magnitude of at most the dialect's limit."""
    grid = e4m3_values(dialect)[:0x80]
    grid = grid[grid <= LIMIT[dialect]]  # codes of positive values are in order; NaN compares false
    code = nearest_code(x.double().abs().clamp(max=LIMIT[dialect]), grid)
    negative = torch.signbit(x)
    if dialect == "fnuz":
        negative = negative & (code > 0)  # there is no -0
    return (code + 0x80 * negative).to(torch.uint8)


def scale_exponent(amax: float, limit: float) -> int:
    """Smallest n with amax <= limit * 2^n, by trying."""
    n = -200
    while amax > math.ldexp(limit, n):
        n += 1
    return n


def quantise(x: Tensor, block: int, dialect: str) -> tuple[Tensor, list[int]]:
    """Codes of a vector in blocks with one power-of-two scale each, and the scales' exponents."""
    codes, exponents = [], []
    for part in x.double().split(block):
        n = scale_exponent(max(float(part.abs().max()), MIN_AMAX), LIMIT[dialect])
        codes.append(nearest_e4m3(part * math.ldexp(1.0, -n), dialect))
        exponents.append(n)
    return torch.cat(codes), exponents


def bf16_bytes(x: Tensor) -> bytes:
    """Little-endian bf16 of fp32 values: the upper half of the bits, rounded to nearest, ties to even."""
    out = []
    for value in x.tolist():
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        out.append(struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16))
    return b"".join(out)


def bf16_values(data: bytes) -> Tensor:
    halves = struct.unpack(f"<{len(data) // 2}H", data)
    values = [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
    return torch.tensor(values, dtype=torch.float64)


# --- pages ------------------------------------------------------------------------------------------


def attention_row(row: Tensor, dialect: str = "ocp") -> tuple[bytes, bytes]:
    """(576 data bytes, 8 scale bytes) of one row fp32 [512] whose values are bf16 already."""
    codes, exponents = quantise(row[:448], 64, dialect)
    data = bytes(codes.tolist()) + bf16_bytes(row[448:])
    return data, bytes([n + 127 for n in exponents] + [0])


def write_attention_row(
    page: bytearray, offset: int, page_rows: int, row: Tensor, dialect: str = "ocp"
) -> None:
    """Put a row where a page of `page_rows` has it: all data first, then 8 scale bytes a row."""
    data, scales = attention_row(row, dialect)
    page[offset * 576 : offset * 576 + 576] = data
    at = page_rows * 576 + offset * 8
    page[at : at + 8] = scales


def read_attention_row(page: bytes, offset: int, page_rows: int, dialect: str = "ocp") -> Tensor:
    """float64 [512] of one row of a page."""
    data = page[offset * 576 : offset * 576 + 576]
    scales = page[page_rows * 576 + offset * 8 :][:7]
    nope = [e4m3_value(data[i], dialect) * 2.0 ** (scales[i // 64] - 127) for i in range(448)]
    return torch.cat((torch.tensor(nope, dtype=torch.float64), bf16_values(data[448:])))


def write_indexer_key(
    page: bytearray, offset: int, page_rows: int, key: Tensor, dialect: str = "ocp"
) -> None:
    """Put a key fp32 [128]: 128 codes a key, then one little-endian fp32 scale a key."""
    codes, (n,) = quantise(key, 128, dialect)
    page[offset * 128 : offset * 128 + 128] = bytes(codes.tolist())
    at = page_rows * 128 + offset * 4
    page[at : at + 4] = struct.pack("<f", math.ldexp(1.0, n))


def read_indexer_key(page: bytes, offset: int, page_rows: int, dialect: str = "ocp") -> Tensor:
    (scale,) = struct.unpack("<f", page[page_rows * 128 + offset * 4 :][:4])
    codes = page[offset * 128 : offset * 128 + 128]
    return torch.tensor([e4m3_value(c, dialect) * scale for c in codes], dtype=torch.float64)


def as_bytes(page: Tensor) -> bytes:
    return bytes(page.tolist())


def as_tensor(pages: list[bytearray]) -> Tensor:
    return torch.tensor([list(page) for page in pages], dtype=torch.uint8)


# --- rotation and norm ------------------------------------------------------------------------------


def rope_table(positions: int, theta: float = 10000.0) -> Tensor:
    """fp32 [positions, 64]: cos(p * theta^(-k / 32)) for k = 0..31, then the sines."""
    angle = torch.arange(positions).double().unsqueeze(1) * theta ** (-torch.arange(32).double() / 32)
    return torch.cat((angle.cos(), angle.sin()), 1).float()


def rotate(x: Tensor, table_row: Tensor, inverse: bool = False) -> Tensor:
    """float64: dimensions (-64 + 2k, -64 + 2k + 1) are one complex number, times cos_k +- i sin_k."""
    out = x.double().clone()
    for k in range(32):
        factor = complex(float(table_row[k]), float(table_row[32 + k]))
        factor = factor.conjugate() if inverse else factor
        at = x.shape[-1] - 64 + 2 * k
        real, imaginary = x[..., at].double(), x[..., at + 1].double()
        out[..., at] = real * factor.real - imaginary * factor.imag
        out[..., at + 1] = real * factor.imag + imaginary * factor.real
    return out


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """float64: x_i / sqrt(sum of squares / n + eps) * weight_i over the last dimension."""
    x = x.double()
    y = x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps).sqrt()
    return y if weight is None else y * weight.double()


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x.double()).exp())
