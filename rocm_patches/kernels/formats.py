"""Number formats inside kernels: e4m3 bytes, power-of-two scales, RoPE pairs. The device side of `rocm_patches.fp8`.

The two e4m3 dialects differ by a factor of two and nothing else that a writer here produces: for every byte but
0x80, 0x7F and 0xFF the FNUZ value is half the OCP value. So bytes are always made and read through the chip's own
conversion (FNUZ on gfx942, OCP elsewhere), and a dialect is only one step in the scale's exponent.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Largest magnitude of a FNUZ code here (fp8.FNUZ.limit): 1.75 * 2^7. A block whose amax is a needs the scale
# 2^n with the smallest n such that a <= 224 * 2^n; adding this to a's bits carries into the exponent exactly when
# its mantissa is above 0.75.
LIMIT = tl.constexpr(224.0)
_BELOW_ONE_QUARTER = tl.constexpr(0x1FFFFF)
_EXPONENT_OF_LIMIT = tl.constexpr(127 + 7)
# Magnitudes up to half the smallest subnormal (2^-10) round to zero; flushing them first means that no negative
# zero reaches a conversion: 0x80 is NaN in FNUZ. A NaN is flushed too, because every comparison with it is false.
_ROUNDS_TO_ZERO = tl.constexpr(2.0**-11)


@triton.jit
def scale_exponent(amax):
    """Exponent n (int32) of the power-of-two scale for fp32 amax > 0 in the FNUZ dialect; OCP's is n - 1."""
    return ((amax.to(tl.int32, bitcast=True) + _BELOW_ONE_QUARTER) >> 23) - _EXPONENT_OF_LIMIT


@triton.jit
def power_of_two(n):
    """2^n as fp32 for int32 n in -126..127, from its bits: exp2 is not exact everywhere."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def encode(x, NATIVE_FNUZ: tl.constexpr):
    """fp32 -> FNUZ e4m3 bytes (uint8), nearest even, clamped to +-224; never 0x80, and zero for NaN.

    The byte of x in FNUZ is the byte of 2 x in OCP, which is how it is made where the hardware speaks OCP.
    """
    x = tl.where(tl.abs(x) > _ROUNDS_TO_ZERO, tl.minimum(tl.maximum(x, -LIMIT), LIMIT), 0.0)
    if NATIVE_FNUZ:
        codes = x.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
    else:
        codes = (x * 2.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def as_float8(codes, NATIVE_FNUZ: tl.constexpr):
    """uint8 codes as the chip's own e4m3 type, for a matrix product. Where that is OCP, values double."""
    if NATIVE_FNUZ:
        values = codes.to(tl.float8e4b8, bitcast=True)
    else:
        values = codes.to(tl.float8e4nv, bitcast=True)
    return values


@triton.jit
def turn(a, b, cos, sin):
    """Rotate interleaved pairs (a, b) by their angles."""
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def turn_row(x, table, INVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rotate the last 64 of WIDTH columns of x fp32 [ROWS, WIDTH], interleaved pairs; `table` points at the
    position's 32 cosines and 32 sines. Columns before them turn by angle zero, which changes no bit."""
    a, b = tl.split(tl.reshape(x, [ROWS, WIDTH // 2, 2]))
    pair = tl.arange(0, WIDTH // 2)
    at = pair - (WIDTH // 2 - 32)
    cos = tl.load(table + at, at >= 0, 1.0)[None, :]
    sin = tl.load(table + 32 + at, at >= 0, 0.0)[None, :]
    if INVERSE:
        sin = -sin
    a, b = turn(a, b, cos, sin)
    return tl.reshape(tl.join(a, b), [ROWS, WIDTH])


@triton.jit
def quantise(x, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, NATIVE_FNUZ: tl.constexpr):
    """Codes uint8 [BLOCKS, BLOCK] and FNUZ exponents int32 [BLOCKS] of fp32 x [BLOCKS * BLOCK]; a block of zeros (or
    of NaN) gets the exponent of 1e-4, as everywhere in DeepSeek-V4."""
    blocks = tl.reshape(x, [BLOCKS, BLOCK])
    exponent = scale_exponent(tl.maximum(tl.max(tl.abs(blocks), 1), 1e-4))
    return encode(blocks * power_of_two(-exponent)[:, None], NATIVE_FNUZ), exponent
