"""rocm_patches.fp8 against the formats' definitions: every code, every tie, every scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rocm_patches import fp8
from tests.rocm_patches import independent

DIALECTS = pytest.mark.parametrize("dialect", [fp8.OCP, fp8.FNUZ], ids=lambda d: d.name)
ALL_BYTES = torch.arange(256, dtype=torch.uint8)


def around(values: Tensor) -> Tensor:
    """Each fp32 value with both of its fp32 neighbours, in both signs."""
    up, down = torch.full_like(values, math.inf), torch.full_like(values, -math.inf)
    near = torch.cat((values, torch.nextafter(values, up), torch.nextafter(values, down)))
    return torch.cat((near, -near))


def same_values(a: Tensor, b: Tensor) -> bool:
    """Equal element by element, NaN equal to NaN, +0 not equal to -0."""
    return bool((torch.signbit(a) == torch.signbit(b)).logical_or(a.isnan()).all()) and torch.equal(
        a.double().nan_to_num(nan=12345.0), b.double().nan_to_num(nan=12345.0)
    )


# --- e4m3 -------------------------------------------------------------------------------------------


@DIALECTS
def test_every_e4m3_byte_decodes_to_its_definition(dialect: fp8.Dialect) -> None:
    assert same_values(fp8.decode_e4m3(ALL_BYTES, dialect), independent.e4m3_values(dialect.name))


@pytest.mark.parametrize(
    ("dialect", "nan_bytes", "largest", "smallest"),
    [(fp8.OCP, [0x7F, 0xFF], 448.0, 2.0**-9), (fp8.FNUZ, [0x80], 240.0, 2.0**-10)],
    ids=["ocp", "fnuz"],
)
def test_landmarks_of_a_dialect(
    dialect: fp8.Dialect, nan_bytes: list[int], largest: float, smallest: float
) -> None:
    values = fp8.decode_e4m3(ALL_BYTES, dialect)
    finite = values[~values.isnan()]
    assert values.isnan().nonzero().flatten().tolist() == nan_bytes
    assert finite.max() == largest and finite.min() == -largest
    assert finite[finite > 0].min() == smallest


def test_the_same_byte_means_half_in_fnuz() -> None:
    finite = [b for b in range(256) if b not in (0x7F, 0x80, 0xFF)]
    codes = torch.tensor(finite, dtype=torch.uint8)
    assert torch.equal(fp8.decode_e4m3(codes, fp8.FNUZ) * 2, fp8.decode_e4m3(codes, fp8.OCP))


@DIALECTS
def test_decode_takes_float8_tensors_too(dialect: fp8.Dialect) -> None:
    assert same_values(
        fp8.decode_e4m3(ALL_BYTES.view(dialect.dtype), dialect), fp8.decode_e4m3(ALL_BYTES, dialect)
    )


@DIALECTS
def test_encode_takes_the_nearest_code_and_the_even_one_of_two(dialect: fp8.Dialect) -> None:
    values = independent.e4m3_values(dialect.name)
    grid = values[:0x80][values[:0x80] <= dialect.limit].float()
    ties = (grid[:-1] + grid[1:]) / 2  # exact: neighbours differ in the last of four bits
    spread = independent.randn(4000, seed=1) * torch.exp2(independent.randn(4000, seed=2, scale=6))
    tiny = torch.tensor([0.0, 2.0**-149, 1e-40, 1e-20])
    x = torch.cat((around(grid), around(ties), around(tiny), spread))
    assert torch.equal(fp8.encode_e4m3(x, dialect), independent.nearest_e4m3(x, dialect.name))


@DIALECTS
def test_encode_inverts_decode(dialect: fp8.Dialect) -> None:
    values = fp8.decode_e4m3(ALL_BYTES, dialect)
    codes = ALL_BYTES[values.abs() <= dialect.limit]
    assert torch.equal(fp8.encode_e4m3(fp8.decode_e4m3(codes, dialect), dialect), codes)


@DIALECTS
def test_encode_saturates(dialect: fp8.Dialect) -> None:
    above = math.nextafter(dialect.limit, math.inf)
    x = torch.tensor([dialect.limit, above, 1e4, 3e38, math.inf])
    decoded = fp8.decode_e4m3(fp8.encode_e4m3(torch.cat((x, -x)), dialect), dialect)
    assert decoded.tolist() == [dialect.limit] * 5 + [-dialect.limit] * 5


@DIALECTS
def test_a_nan_stays_a_nan(dialect: fp8.Dialect) -> None:
    assert fp8.decode_e4m3(fp8.encode_e4m3(torch.tensor([math.nan]), dialect), dialect).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fnuz_never_writes_its_nan_for_a_number(dtype: torch.dtype) -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    x = halves.view(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
    x = x[~x.isnan()]
    assert len(x) > 60000
    assert not bool((fp8.encode_e4m3(x, fp8.FNUZ) == 0x80).any())


@pytest.mark.parametrize(
    ("arch", "dialect"),
    [
        ("gfx942", fp8.FNUZ),
        ("gfx942:sramecc+:xnack-", fp8.FNUZ),
        ("gfx940", fp8.FNUZ),
        ("gfx941", fp8.FNUZ),
        ("gfx950", fp8.OCP),
        ("gfx90a", fp8.OCP),
        ("gfx1100", fp8.OCP),
    ],
)
def test_dialect_of_an_architecture(arch: str, dialect: fp8.Dialect) -> None:
    assert fp8.dialect_of(arch) is dialect


# --- e8m0 and scales --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_every_e8m0_byte(dtype: torch.dtype) -> None:
    values = fp8.decode_e8m0(ALL_BYTES.view(dtype))
    expected = [math.ldexp(1.0, byte - 127) for byte in range(255)] + [math.nan]
    assert same_values(values, torch.tensor(expected, dtype=torch.float64))


def test_power_of_two_is_exact_over_all_of_fp32() -> None:
    exponents = torch.arange(-149, 128, dtype=torch.int32)
    expected = [math.ldexp(1.0, n) for n in exponents.tolist()]
    assert fp8.power_of_two(exponents).tolist() == expected


@pytest.mark.parametrize("limit", [448.0, 224.0, 6.0])
def test_scale_exponent_at_and_around_powers_of_two(limit: float) -> None:
    exponents = range(-120, 119)
    exact = torch.tensor([math.ldexp(limit, n) for n in exponents])
    above, below = (torch.nextafter(exact, torch.tensor(to)) for to in (math.inf, 0.0))
    assert fp8.scale_exponent(exact, limit).tolist() == list(exponents)
    assert fp8.scale_exponent(above, limit).tolist() == [n + 1 for n in exponents]
    assert fp8.scale_exponent(below, limit).tolist() == list(exponents)
    assert fp8.scale_exponent(exact, limit).dtype == torch.int32


@given(st.floats(min_value=2.0**-14, max_value=2.0**127, width=32), st.sampled_from([448.0, 224.0, 6.0]))
@settings(max_examples=300, deadline=None)
def test_scale_exponent_is_the_smallest_that_fits(amax: float, limit: float) -> None:
    assert int(fp8.scale_exponent(torch.tensor(amax), limit)) == independent.scale_exponent(amax, limit)


# Up to 2^127: the last code of fp32's topmost binade rounds up to 2^128, which fp32 cannot hold.
BLOCK_OF_VALUES = st.lists(
    st.floats(min_value=-(2.0**127), max_value=2.0**127, width=32), min_size=12, max_size=12
) | st.lists(st.floats(min_value=-8, max_value=8, width=32), min_size=12, max_size=12)


@DIALECTS
@given(values=BLOCK_OF_VALUES)
@settings(max_examples=150, deadline=None)
def test_quantise_equals_the_definition(dialect: fp8.Dialect, values: list[float]) -> None:
    x = torch.tensor(values)
    codes, exponent = fp8.quantise_ue8m0(x, 4, dialect)
    expected_codes, expected_exponents = independent.quantise(x, 4, dialect.name)
    assert exponent.tolist() == expected_exponents
    assert torch.equal(codes, expected_codes)


@DIALECTS
@given(values=BLOCK_OF_VALUES)
@settings(max_examples=150, deadline=None)
def test_round_trip_of_a_block(dialect: fp8.Dialect, values: list[float]) -> None:
    """Within half a step of e4m3 (2^-4 of a normal value, else half the smallest value); then stable."""
    x = torch.tensor(values)
    codes, exponent = fp8.quantise_ue8m0(x, 4, dialect)
    back = fp8.dequantise_ue8m0(codes, exponent, dialect)
    smallest = independent.e4m3_value(0x01, dialect.name)
    half_step = torch.maximum(
        x.double().abs() * 2.0**-4, smallest / 2 * torch.exp2(exponent.double()).repeat_interleave(4)
    )
    assert bool(((back.double() - x.double()).abs() <= half_step).all())
    assert torch.equal(fp8.dequantise_ue8m0(*fp8.quantise_ue8m0(back, 4, dialect), dialect), back)


@DIALECTS
def test_a_block_of_zeros_has_a_finite_scale(dialect: fp8.Dialect) -> None:
    codes, exponent = fp8.quantise_ue8m0(torch.zeros(2, 8), 4, dialect)
    assert not codes.any()
    assert exponent.unique().tolist() == [independent.scale_exponent(1e-4, dialect.limit)]


def test_both_dialects_give_the_same_codes_and_scales_one_apart() -> None:
    """What the FNUZ limit of 224 (not 240) is for."""
    x = independent.randn(64, 512, seed=3, scale=3)
    (ocp, n), (fnuz, m) = (fp8.quantise_ue8m0(x, 64, d) for d in (fp8.OCP, fp8.FNUZ))
    assert torch.equal(m, n + 1)
    assert torch.equal(fp8.dequantise_ue8m0(ocp, n, fp8.OCP), fp8.dequantise_ue8m0(fnuz, m, fp8.FNUZ))
    assert torch.equal(ocp.masked_fill(ocp == 0x80, 0), fnuz)


def test_quantise_works_on_any_leading_shape_and_type() -> None:
    x = independent.randn(2, 3, 128, seed=4, dtype=torch.bfloat16)
    codes, exponent = fp8.quantise_ue8m0(x, 64)
    assert codes.shape == (2, 3, 128) and exponent.shape == (2, 3, 2)
    one, n = fp8.quantise_ue8m0(x[1, 2].float(), 64)
    assert torch.equal(codes[1, 2], one) and torch.equal(exponent[1, 2], n)
    assert fp8.quantise_ue8m0(x[:0], 64)[0].shape == (0, 3, 128)


# --- e2m1 -------------------------------------------------------------------------------------------


def test_every_e2m1_code_decodes_to_its_definition() -> None:
    """Sign, two exponent bits, one mantissa bit: (2 + M) * 2^(E - 2), or M / 2 where E is 0."""
    expected = []
    for code in range(16):
        exponent, mantissa = (code >> 1) & 3, code & 1
        magnitude = math.ldexp(2 + mantissa, exponent - 2) if exponent else mantissa / 2
        expected.append(-magnitude if code & 8 else magnitude)
    assert same_values(fp8.decode_e2m1(torch.arange(16)), torch.tensor(expected, dtype=torch.float64))


def test_e2m1_takes_the_nearest_code_and_the_even_one_of_two() -> None:
    grid = torch.tensor(independent.E2M1)
    ties = (grid[:-1] + grid[1:]) / 2
    x = torch.cat((around(grid), around(ties), independent.randn(2000, seed=5, scale=3)))
    expected = independent.nearest_code(x.double().abs().clamp(max=6.0), grid) + 8 * torch.signbit(x)
    assert torch.equal(fp8.encode_e2m1(x).long(), expected)


def test_e2m1_ties_by_hand() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert fp8.decode_e2m1(fp8.encode_e2m1(ties)).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_e2m1_saturates() -> None:
    x = torch.tensor([6.0, 6.1, 100.0, math.inf])
    assert fp8.decode_e2m1(fp8.encode_e2m1(torch.cat((x, -x)))).tolist() == [6.0] * 4 + [-6.0] * 4


def test_nibbles_pack_with_the_even_column_low_and_unpack_to_the_same() -> None:
    codes = torch.tensor([[low, high] for high in range(16) for low in range(16)]).reshape(4, 128)
    packed = fp8.pack_nibbles(codes)
    assert torch.equal(packed.flatten(), ALL_BYTES)
    assert torch.equal(fp8.unpack_nibbles(packed).long(), codes)
    assert torch.equal(fp8.unpack_nibbles(packed.view(torch.int8)).long(), codes)


# --- weights ----------------------------------------------------------------------------------------

SHAPES = [(128, 128), (256, 384), (130, 260), (127, 129), (1, 1), (5, 700)]


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_block_weight_equals_the_definition_tile_by_tile(n: int, k: int) -> None:
    weight = independent.randn(n, k, seed=n + k) * torch.exp2(independent.randn(n, k, seed=n - k, scale=3))
    codes, scale = fp8.quantise_block_weight(weight)
    rows, columns = math.ceil(n / 128), math.ceil(k / 128)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == (n, k)
    assert scale.dtype == torch.uint8 and scale.shape == (rows, columns)
    for i in range(rows):
        for j in range(columns):
            tile = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            flat = weight[tile].flatten()
            expected, (exponent,) = independent.quantise(flat, flat.numel(), "ocp")
            assert int(scale[i, j]) == exponent + 127
            assert torch.equal(codes.view(torch.uint8)[tile].flatten(), expected)


@pytest.mark.parametrize("kind", ["e8m0 bytes", "e8m0", "fp32"])
@pytest.mark.parametrize(("n", "k", "block"), [(130, 260, (128, 128)), (5, 7, (2, 3)), (64, 96, (32, 64))])
def test_block_weight_decodes_element_by_element(n: int, k: int, block: tuple[int, int], kind: str) -> None:
    """W[r, c] = value(byte[r, c]) * scale[r // block rows, c // block columns]."""
    codes = torch.randint(0, 0x7F, (n, k), generator=independent.generator(1), dtype=torch.uint8)
    shape = (math.ceil(n / block[0]), math.ceil(k / block[1]))
    exponent = torch.randint(100, 140, shape, generator=independent.generator(2), dtype=torch.uint8)
    scale = {
        "e8m0 bytes": exponent,
        "e8m0": exponent.view(torch.float8_e8m0fnu),
        "fp32": torch.exp2(exponent.float() - 127) * 1.25,
    }[kind]
    factor = 1.25 if kind == "fp32" else 1.0
    decoded = fp8.dequantise_block_weight(codes.view(torch.float8_e4m3fn), scale, block)
    values = independent.e4m3_values("ocp")
    expected = torch.empty(n, k, dtype=torch.float64)
    for r in range(n):
        for c in range(k):
            step = factor * 2.0 ** (int(exponent[r // block[0], c // block[1]]) - 127)
            expected[r, c] = values[int(codes[r, c])] * step
    assert torch.equal(decoded.double(), expected)


@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 96)])
def test_mxfp4_equals_the_definition(shape: tuple[int, ...]) -> None:
    weight = independent.randn(*shape, seed=6, scale=0.02)
    packed, scale = fp8.quantise_mxfp4(weight)
    assert packed.shape == (*shape[:-1], shape[-1] // 2) and scale.shape == (*shape[:-1], shape[-1] // 32)
    decoded = fp8.dequantise_mxfp4(packed, scale)
    rows, bytes_, scales = weight.flatten(0, -2), packed.flatten(0, -2), scale.flatten(0, -2)
    grid = torch.tensor(independent.E2M1)
    for r, row in enumerate(rows):
        for b, block in enumerate(row.split(32)):
            exponent = independent.scale_exponent(float(block.abs().max()), 6.0)
            assert int(scales[r, b]) == exponent + 127
            code = independent.nearest_code(block.double().abs() * 2.0**-exponent, grid)
            code = code + 8 * torch.signbit(block)
            expected = code[0::2] + 16 * code[1::2]
            assert torch.equal(bytes_[r, 16 * b : 16 * b + 16].long(), expected)
            value = grid[code % 8].double() * 2.0**exponent * (1 - 2 * (code // 8))
            assert torch.equal(decoded.flatten(0, -2)[r, 32 * b : 32 * b + 32].double(), value)


FINITE_OCP = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_ocp_to_fnuz_changes_no_value_for_any_code_under_any_e8m0_scale(dtype: torch.dtype) -> None:
    scale = torch.arange(254, dtype=torch.uint8).unsqueeze(1)
    weight, doubled = fp8.ocp_to_fnuz(FINITE_OCP.view(torch.float8_e4m3fn).unsqueeze(0), scale.view(dtype))
    assert weight.dtype == torch.float8_e4m3fnuz and doubled.dtype == dtype
    after = independent.e4m3_values("fnuz")[weight.view(torch.uint8).long()]  # [1, codes]
    before = independent.e4m3_values("ocp")[FINITE_OCP.long()].unsqueeze(0)
    steps_after = torch.exp2(doubled.view(torch.uint8).double() - 127)
    steps_before = torch.exp2(scale.double() - 127)
    assert torch.equal(after * steps_after, before * steps_before)


def test_ocp_to_fnuz_changes_no_value_under_fp32_scales() -> None:
    scale = torch.cat(
        (torch.tensor([2.0**-149, 1e-40, 1e-20, 1.0, 3e37, 1.7e38]), torch.rand(50) + 1e-3)
    ).unsqueeze(1)
    weight, doubled = fp8.ocp_to_fnuz(FINITE_OCP.view(torch.float8_e4m3fn).unsqueeze(0), scale)
    assert doubled.dtype == torch.float32
    after = independent.e4m3_values("fnuz")[weight.view(torch.uint8).long()] * doubled.double()
    before = independent.e4m3_values("ocp")[FINITE_OCP.long()].unsqueeze(0) * scale.double()
    assert torch.equal(after, before)


def test_ocp_to_fnuz_keeps_a_whole_weight_and_its_input() -> None:
    source = independent.randn(130, 260, seed=7)
    source[:8] = -0.0
    weight, scale = fp8.quantise_block_weight(source)
    copies = weight.view(torch.uint8).clone(), scale.clone()
    converted = fp8.ocp_to_fnuz(weight, scale)
    assert torch.equal(
        fp8.dequantise_block_weight(*converted, dialect=fp8.FNUZ), fp8.dequantise_block_weight(weight, scale)
    )
    assert torch.equal(weight.view(torch.uint8), copies[0]) and torch.equal(scale, copies[1])


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_ocp_to_fnuz_refuses_a_nan_code(code: int) -> None:
    weight = torch.tensor([[0x10, code]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="NaN"):
        fp8.ocp_to_fnuz(weight, torch.tensor([[127]], dtype=torch.uint8))


@pytest.mark.parametrize(
    "scale",
    [
        torch.tensor([[127, 254]], dtype=torch.uint8),
        torch.tensor([[127, 255]], dtype=torch.uint8),
        torch.tensor([[255, 1]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
        torch.tensor([[1.0, 2e38]]),
        torch.tensor([[math.nan, 1.0]]),
    ],
    ids=["2^127", "NaN byte", "e8m0 NaN", "fp32 too large", "fp32 NaN"],
)
def test_ocp_to_fnuz_refuses_a_scale_that_cannot_double(scale: Tensor) -> None:
    weight = torch.zeros(1, 256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="scale"):
        fp8.ocp_to_fnuz(weight, scale)
