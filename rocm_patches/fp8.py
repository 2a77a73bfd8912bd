"""The small number formats of DeepSeek-V4: e4m3 in both dialects, e8m0 scales, e2m1 nibbles.

The only module that knows them. Everything here is exact or rounds to nearest, ties to even, and works
on tensors of any shape unless a docstring says otherwise. Formats: OCP "8-bit Floating Point" (e4m3fn)
and "Microscaling Formats (MX)" (e8m0, e2m1) specifications, https://www.opencompute.org/documents/;
FNUZ as in https://arxiv.org/abs/2206.02915 and LLVM's APFloat `Float8E4M3FNUZ`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

E8M0_BIAS = 127
E8M0_NAN = 255
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
# DeepSeek-V4 never lets a block's amax fall under this, so that an all-zero block has a finite scale
# (vllm/models/deepseek_v4/common/ops/cache_utils.py, release 0.32.0).
MIN_AMAX = 1e-4


@dataclass(frozen=True)
class Dialect:
    """One reading of an e4m3 byte.

    `limit` is the largest magnitude that writers clamp to. For FNUZ it is 224, not the format's 240:
    224 is half of 448, so a scale computed for one dialect differs from the other's by exactly one power
    of two and both give the same codes.
    """

    name: str
    dtype: torch.dtype
    limit: float


OCP = Dialect("ocp", torch.float8_e4m3fn, 448.0)
FNUZ = Dialect("fnuz", torch.float8_e4m3fnuz, 224.0)
DIALECTS = {d.name: d for d in (OCP, FNUZ)}


def dialect_of(arch: str) -> Dialect:
    """Dialect of an architecture name: FNUZ for the gfx94x family (MI300X, MI308X, MI325X), else OCP.

    Decided by the architecture, never by a product name: MI325X is gfx942 and reads FNUZ like MI300X.
    """
    return FNUZ if arch.startswith("gfx94") else OCP


# --- e4m3 -------------------------------------------------------------------------------------------


def encode_e4m3(x: Tensor, dialect: Dialect = OCP) -> Tensor:
    """Round to e4m3 bytes (uint8, same shape), clamping to +-`dialect.limit` first.

    The clamp comes before the cast because e4m3fn has no infinity: an overflow would become NaN. A
    negative value that rounds to zero gives byte 0x00 in FNUZ, where 0x80 is the NaN.
    """
    return x.float().clamp(-dialect.limit, dialect.limit).to(dialect.dtype).view(torch.uint8)


def decode_e4m3(codes: Tensor, dialect: Dialect = OCP) -> Tensor:
    """Values of e4m3 bytes (uint8 or any one-byte float8 tensor) as fp32, same shape."""
    return codes.view(torch.uint8).view(dialect.dtype).float()


# --- e8m0 -------------------------------------------------------------------------------------------


def decode_e8m0(codes: Tensor) -> Tensor:
    """2^(byte - 127) as fp32; byte 255 is NaN. Takes uint8 or torch.float8_e8m0fnu."""
    codes = codes.view(torch.uint8)
    return power_of_two(codes.int() - E8M0_BIAS).masked_fill(codes == E8M0_NAN, float("nan"))


def scale_exponent(amax: Tensor, limit: float) -> Tensor:
    """Smallest integer n (int32) with `amax <= limit * 2^n`: the exponent of a power-of-two scale.

    Found from the float's own exponent instead of log2, so that it is exact at powers of two.
    """
    mantissa, exponent = torch.frexp(amax.double() / limit)  # mantissa in [0.5, 1)
    return torch.where(mantissa == 0.5, exponent - 1, exponent).int()


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as fp32, exact, for an integer tensor with values in -149..127."""
    # The exponent field of a float64; its range makes fp32's subnormals exact as well.
    return ((exponent.long() + 1023) << 52).view(torch.float64).float()


def quantise_ue8m0(x: Tensor, block: int, dialect: Dialect = OCP) -> tuple[Tensor, Tensor]:
    """Quantise the last dimension in blocks with one power-of-two scale each.

    x [..., n * block], any float type. Returns e4m3 codes uint8 [..., n * block] and scale exponents
    int32 [..., n]; the value of a code is `decode_e4m3(code) * 2^exponent`.
    """
    blocks = x.float().unflatten(-1, (-1, block))
    exponent = scale_exponent(blocks.abs().amax(-1).clamp(min=MIN_AMAX), dialect.limit)
    codes = encode_e4m3(blocks * power_of_two(-exponent).unsqueeze(-1), dialect)
    return codes.flatten(-2), exponent


def dequantise_ue8m0(codes: Tensor, exponent: Tensor, dialect: Dialect = OCP) -> Tensor:
    """Inverse of `quantise_ue8m0`: fp32 [..., n * block] from codes and int exponents [..., n]."""
    blocks = decode_e4m3(codes, dialect).unflatten(-1, (exponent.shape[-1], -1))
    return (blocks * power_of_two(exponent).unsqueeze(-1)).flatten(-2)


# --- e2m1 -------------------------------------------------------------------------------------------


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 codes (uint8, 0..15, same shape), ties to the even code, saturating at +-6."""
    grid = torch.tensor(E2M1_MAGNITUDES, device=x.device)
    midpoints = (grid[:-1] + grid[1:]) / 2
    magnitude = x.float().abs().unsqueeze(-1)
    lower_is_even = torch.arange(len(midpoints), device=x.device) % 2 == 0
    above = torch.where(lower_is_even, magnitude > midpoints, magnitude >= midpoints)
    return above.sum(-1).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Values of e2m1 codes 0..15 (any integer type) as fp32, same shape."""
    grid = torch.tensor(E2M1_MAGNITUDES + tuple(-m for m in E2M1_MAGNITUDES), device=codes.device)
    return grid[codes.int()]


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., K] codes 0..15 -> [..., K/2] bytes, even column in the low nibble."""
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., K/2] bytes -> [..., K] codes 0..15 (uint8). Inverse of `pack_nibbles`."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)


# --- weights of a published checkpoint --------------------------------------------------------------


def quantise_block_weight(weight: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """[N, K] -> e4m3fn weight [N, K] and e8m0 scale bytes uint8 [ceil(N/block), ceil(K/block)].

    One power-of-two scale per block x block tile, the layout of `.weight` and `.scale` in the
    published checkpoints.
    """
    n, k = weight.shape
    padded = F.pad(weight.float(), (0, -k % block, 0, -n % block))
    tiles = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block))  # [N', block, K', block]
    exponent = scale_exponent(tiles.abs().amax((1, 3)).clamp(min=MIN_AMAX), OCP.limit)
    codes = encode_e4m3(tiles * power_of_two(-exponent)[:, None, :, None], OCP)
    codes = codes.flatten(2).flatten(0, 1)[:n, :k].contiguous()
    return codes.view(OCP.dtype), (exponent + E8M0_BIAS).to(torch.uint8)


def dequantise_block_weight(
    weight: Tensor, scale: Tensor, block: tuple[int, int] = (128, 128), dialect: Dialect = OCP
) -> Tensor:
    """fp32 [N, K] from e4m3 [N, K] and one scale per tile.

    `scale` [ceil(N/block[0]), ceil(K/block[1])] is fp32, or e8m0 (uint8 or torch.float8_e8m0fnu).
    """
    n, k = weight.shape
    scale = scale if scale.dtype == torch.float32 else decode_e8m0(scale)
    full = scale.repeat_interleave(block[0], 0)[:n].repeat_interleave(block[1], 1)[:, :k]
    return decode_e4m3(weight, dialect) * full


def quantise_mxfp4(weight: Tensor, block: int = 32) -> tuple[Tensor, Tensor]:
    """[..., K] -> packed e2m1 uint8 [..., K/2] and e8m0 scale bytes uint8 [..., K/block].

    The scale is the smallest power of two that keeps the block's largest magnitude within 6.
    """
    blocks = weight.float().unflatten(-1, (-1, block))
    exponent = scale_exponent(blocks.abs().amax(-1).clamp(min=MIN_AMAX), E2M1_MAX)
    codes = encode_e2m1(blocks * power_of_two(-exponent).unsqueeze(-1))
    return pack_nibbles(codes.flatten(-2)), (exponent + E8M0_BIAS).to(torch.uint8)


def dequantise_mxfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., K] from packed e2m1 [..., K/2] and e8m0 bytes [..., K/block]."""
    codes = decode_e2m1(unpack_nibbles(packed))
    blocks = codes.unflatten(-1, (scale.shape[-1], -1))
    return (blocks * decode_e8m0(scale).unsqueeze(-1)).flatten(-2)


def ocp_to_fnuz(weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Re-read an OCP block-scaled weight as FNUZ without changing any value.

    The same byte means half the OCP value in FNUZ, so the scale doubles; byte 0x80 (-0 in OCP, NaN in
    FNUZ) becomes 0x00. `weight` is e4m3fn [N, K]; `scale` is fp32 or e8m0 and keeps its type.

    Raises ValueError for an e4m3fn NaN (0x7F, 0xFF), which has no FNUZ twin under that rule (0x7F would
    become 240), and for a scale that is NaN or too large to double.
    """
    codes = weight.view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise ValueError("OCP e4m3 weight holds NaN codes (0x7F or 0xFF); the checkpoint is damaged")
    codes = codes.masked_fill(codes == 0x80, 0)
    if scale.dtype == torch.float32:
        doubled = scale * 2
        fits = doubled.isfinite()
    else:
        exponent = scale.view(torch.uint8)
        fits = exponent < E8M0_NAN - 1
        doubled = (exponent + 1).view(scale.dtype)
    if not bool(fits.all()):
        raise ValueError("a block scale is NaN or too large to double; the checkpoint is damaged")
    return codes.view(FNUZ.dtype), doubled
