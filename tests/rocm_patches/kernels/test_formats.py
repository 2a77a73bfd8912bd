"""Number formats inside kernels, code by code, against rocm_patches.fp8."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from rocm_patches import fp8
from rocm_patches.kernels import formats, output

NATIVE = pytest.mark.parametrize("native", [True, False], ids=["as gfx942", "as an OCP chip"])
CODES = torch.arange(256, dtype=torch.uint8)


@triton.jit
def encode_kernel(x_ptr, out_ptr, N: tl.constexpr, NATIVE: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, formats.encode(tl.load(x_ptr + i), NATIVE))


@triton.jit
def decode_kernel(codes_ptr, out_ptr, NATIVE: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(out_ptr + i, formats.as_float8(tl.load(codes_ptr + i), NATIVE).to(tl.float32))


@triton.jit
def exponent_kernel(x_ptr, out_ptr, scale_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    n = formats.scale_exponent(tl.load(x_ptr + i))
    tl.store(out_ptr + i, n)
    tl.store(scale_ptr + i, formats.power_of_two(n))


def encode(x: torch.Tensor, native: bool) -> torch.Tensor:
    padded = torch.nn.functional.pad(x, (0, -len(x) % 1024))
    out = torch.empty(len(padded), dtype=torch.uint8)
    for a in range(0, len(padded), 1024):
        encode_kernel[(1,)](padded[a : a + 1024], out[a : a + 1024], N=1024, NATIVE=native)
    return out[: len(x)]


@NATIVE
def test_every_code_survives(native: bool) -> None:
    """Every code up to the limit: decode, encode, the same byte."""
    values = fp8.decode_e4m3(CODES, fp8.FNUZ)
    finite = values.abs() <= fp8.FNUZ.limit
    assert torch.equal(encode(values[finite], native), CODES[finite])
    assert int(finite.sum()) == 253  # all but NaN and +-240, which DeepSeek-V4 never writes


@NATIVE
def test_encode_is_fp8_encode(native: bool) -> None:
    """Every representable value, every midpoint between two, and their fp32 neighbours; both signs; past the limit."""
    grid = fp8.decode_e4m3(CODES[:128], fp8.FNUZ)
    middle = (grid[1:] + grid[:-1]) / 2
    x = torch.cat((grid, middle))
    x = torch.cat(
        (
            x,
            torch.nextafter(x, torch.tensor(1e9)),
            torch.nextafter(x, torch.tensor(-1e9)),
            torch.tensor([1e9]),
        )
    )
    x = torch.cat((x, -x))
    assert torch.equal(encode(x, native), fp8.encode_e4m3(x, fp8.FNUZ))


@NATIVE
def test_no_input_gives_the_nan_byte(native: bool) -> None:
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, -1e-30, -(2.0**-11), -(2.0**-149)])
    codes = encode(bad, native)
    assert codes.tolist() == [0, 0x7E, 0xFE, 0, 0, 0, 0]


def test_decoding_doubles_on_an_ocp_chip() -> None:
    """The same byte, for all codes but 0x80, 0x7F and 0xFF: what the factor 1/4 of the product relies on."""
    out = {}
    for native in (True, False):
        out[native] = torch.empty(256)
        decode_kernel[(1,)](CODES, out[native], NATIVE=native)
    same = torch.ones(256, dtype=torch.bool)
    same[[0x7F, 0x80, 0xFF]] = False
    assert torch.equal(out[False][same], 2 * out[True][same])
    assert torch.equal(out[True][same], fp8.decode_e4m3(CODES, fp8.FNUZ)[same])


def test_scale_exponents_are_exact() -> None:
    """At every power of two and at 1.75 times it, one float below and one above: where rounding in log2 goes wrong."""
    edges = torch.cat([2.0 ** torch.arange(-13, 40), 1.75 * 2.0 ** torch.arange(-13, 40)])
    x = torch.cat(
        (edges, torch.nextafter(edges, torch.tensor(0.0)), torch.nextafter(edges, torch.tensor(1e30)))
    )
    x = torch.nn.functional.pad(x, (0, 512 - len(x)), value=1.0)
    n, scale = torch.empty(512, dtype=torch.int32), torch.empty(512)
    exponent_kernel[(1,)](x, n, scale, N=512)
    assert torch.equal(n, fp8.scale_exponent(x, fp8.FNUZ.limit))
    assert torch.equal(n - 1, fp8.scale_exponent(x, fp8.OCP.limit))
    assert torch.equal(scale, fp8.power_of_two(n))


def test_the_converted_weight_is_the_weight() -> None:
    """OCP -> FNUZ -> value, for all 254 codes that are numbers, under scales at both ends of their range."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes.masked_fill((codes & 0x7F) == 0x7F, 0).repeat(128 * 512 // 256).view(128, 512)
    for byte in (1, 127, 253):
        scale = torch.full((1, 4), byte, dtype=torch.uint8)
        prepared = output.prepare(codes.view(torch.float8_e4m3fn), scale, 1)
        values = fp8.decode_e4m3(prepared.codes[0], fp8.FNUZ).double() * prepared.scales[
            0
        ].double().repeat_interleave(128, 1)
        expected = fp8.decode_e4m3(codes, fp8.OCP).double() * 2.0 ** (byte - 127)
        assert torch.equal(values, expected)
        assert not bool((prepared.codes == 0x80).any())
