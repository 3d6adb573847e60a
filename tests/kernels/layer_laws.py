"""The kernels of a layer against their references: laws for the interpreter and for the GPU.

Codes are compared as values: they may differ by one code where FP32 rounding or an approximate
exponential puts a value on the other side of an edge, in `SLACK` of all places at most. Blocks,
which involve powers of two only, are exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import E4M3, E5M2
from coat_jax.kernels import activation, gemm, int8, norm, rotary
from coat_jax.kernels.activation import ACTIVATIONS, Limited
from coat_jax.kernels.cast import cast
from coat_jax.numerics.blocks import from_blocks, to_blocks
from coat_jax.numerics.formats import format_of
from coat_jax.ops import Rotary

SLACK = 0.01
ROUNDING = 2.0**-4  # of E4M3, relatively
FAR_FROM_ZERO = 57344 * 2.0**-19  # what is left of derivatives of activations there
SMALL = [(2, 6, 72), (1, 70, 160), (3, 5, 130)]  # no multiple of a tile, a block or a warp
LARGE = [(4, 512, 4096), (2, 100, 11008), (1, 333, 2047)]


# Rows, heads and the size of a head; positions of their own in each sequence, or shared.
ROTARY_CASES = [((2, 6), 3, 64, True), ((1, 70), 5, 32, False), ((3, 5), 4, 32, True)]
LARGE_ROTARY_CASES = [
    ((4, 512), 32, 128, False),
    ((2, 333), 8, 128, True),
    ((1, 999), 3, 256, False),
]


class NormCase(NamedTuple):
    kind: str = "rms"
    scale: bool = True
    shift: bool = False
    residual: bool = True
    size: int = 16
    exact: bool = False  # the forward pass takes x itself
    stochastic: bool = False
    products: str = "fp8"  # that take the norm


NORMS = [
    NormCase(),
    NormCase(scale=False, residual=False),
    NormCase("layer", shift=True, size=32),
    NormCase("layer", scale=False, size=128),
    NormCase(exact=True),
    NormCase("layer", shift=True, exact=True),
    NormCase(exact=True, stochastic=True),
    NormCase("layer", shift=True, size=64, exact=True, stochastic=True),
    NormCase(exact=True, stochastic=True, products="int8"),
    NormCase("layer", shift=True, exact=True, products="int8"),
    NormCase("layer", shift=True, exact=True, stochastic=True, products="bf16"),
]


def numbers(seed, shape, dtype=jnp.bfloat16, spread=3.0):
    """Normal numbers of various sizes, and a row of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.uniform(-spread, spread, (*shape[:-1], 1)))
    x[0, 0] = 0
    return jnp.asarray(x, dtype)


def assert_codes(got, want):
    """The same codes but for a few neighbours."""
    fmt = format_of(want.dtype)
    got, want = np.float64(np.asarray(got)), np.float64(np.asarray(want))
    assert got.shape == want.shape
    step = np.maximum(np.abs(want) * 2.0**-fmt.mantissa_bits, fmt.tiny)
    np.testing.assert_array_less(np.abs(got - want), 1.001 * step)
    assert np.mean(got != want) <= SLACK


def assert_same_bytes(got, want):
    """Trees of FP8 codes and exponents that are the same, bit for bit."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def assert_rows(got, want, lost=()):
    """The same rows of INT8 but for a few neighbours; rows that are lost have codes of no meaning.

    Rows are counted over all leading axes.
    """
    np.testing.assert_allclose(got.largest, want.largest, rtol=1e-5)
    finite = np.isfinite(np.ravel(got.largest))
    assert np.flatnonzero(~finite).tolist() == list(lost)
    got, want = (each.codes.reshape(len(finite), -1)[finite] for each in (got, want))
    assert_codes_of_int8(got, want)


def assert_codes_of_int8(got, want):
    """The same INT8 codes but for a few neighbours."""
    assert got.dtype == want.dtype == jnp.int8
    off = np.abs(np.int32(got) - np.int32(want))
    assert off.shape == want.shape
    assert np.max(off, initial=0) <= 1
    assert np.mean(off) <= SLACK


def check_int8_columns(shape):
    w = numbers(0, shape[-2:])
    w = w.at[:, 3].set(0).at[1, 5].set(jnp.inf).at[2, 7].set(jnp.nan)
    got, want = int8.round_columns(w, "triton"), int8.round_columns(w)
    assert not np.any(got.codes[3])
    assert_rows(got, want, lost=[5, 7])


def check_int8_rows(shape):
    x = numbers(0, shape)
    x = x.at[0, 2, 1].set(jnp.inf).at[0, 3, 7].set(jnp.nan)
    got, want = int8.round_rows(x, "triton"), int8.round_rows(x)
    assert not np.any(got.codes[0, 0])  # a row of zeros
    assert_rows(got, want, lost=[2, 3])


def both_layouts(x, scale, dtype, stream=None):
    codes = gemm.operand(x, dtype, scale=scale, stream=stream).values
    return codes, jnp.moveaxis(codes, -1, 0)


def check_cast(shape, dtype, stream):
    x = numbers(0, shape)
    scale = gemm.tensor_scale(jnp.max(jnp.abs(x)).astype(jnp.float32), dtype)
    for layout in ("straight", "transposed", "both"):
        *codes, none = cast(x, scale, dtype, layout, stream=stream)
        assert none is None
        assert [c is None for c in codes] == [layout == "transposed", layout == "straight"]
        for got, want in zip(codes, both_layouts(x, scale, dtype, stream), strict=True):
            if got is not None:
                assert_codes(got, want)
        *measured, lengths = cast(x, scale, dtype, layout, stream=stream, lengths=True)
        jax.tree.map(np.testing.assert_array_equal, measured, codes)
        if layout != "transposed":
            want = gemm.operand(x, dtype, scale=scale, stream=stream, lengths=True).lengths
            np.testing.assert_allclose(lengths, want, rtol=1e-6)


def check_rotary(shape, heads, head, dtype, *, per_sequence, stream):
    y = numbers(5, (*shape, heads * head)).reshape(*shape, heads, head)
    positions = jnp.arange(shape[1]) * 3
    if per_sequence:
        positions = positions + jnp.arange(shape[0])[:, None]
    cos, sin = Rotary().cos_sin(positions, head)
    scale = gemm.tensor_scale(rotary.GROWTH * gemm.largest_magnitude(y), dtype)
    arguments = (y, cos, sin, scale, dtype)
    got = rotary.rotary_backward_cast(*arguments, stream=stream)
    back = rotary.rotary_backward(y.astype(jnp.float32), cos, sin).reshape(*shape, -1)
    want = both_layouts(back, scale, dtype, stream)
    for a, b in zip(got, want, strict=True):
        assert_codes(a, b)


def check_norm(shape, case: NormCase):
    columns, size = shape[-1], case.size
    of = norm.Norm(
        1 + numbers(1, (1, 2, columns), jnp.float32, 0.1)[0, 1] if case.scale else None,
        numbers(2, (1, 2, columns), jnp.float32, 0.1)[0, 1] if case.shift else None,
        case.kind,
        1e-5,
    )
    x = numbers(3, shape)
    rounding = ROUNDING * (1 + case.stochastic)
    limit = norm.bound_of_norm(of, columns, rounding if case.exact else 0.0)
    scale = gemm.tensor_scale(limit, E4M3)
    how = {"exact": case.exact, "stochastic": case.stochastic, "products": case.products}
    blocks, stats, straight, largest = norm.norm_forward(x, of, scale, E4M3, size, **how)
    exact = to_blocks(x, size=size, stochastic=case.stochastic)
    assert_same_bytes(blocks, exact)
    values = from_blocks(exact, size=size)
    seen = x.astype(jnp.float32) if case.exact else values
    expected = norm.statistics(seen, of)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), stats, expected)
    stream = "inputs" if case.stochastic else None
    transposed = norm.norm_cast(blocks, stats, of, scale, size, stream=stream)
    n, again = (norm.normalize(rows, expected, of) for rows in (seen, values))
    assert max(jnp.max(jnp.abs(n)), jnp.max(jnp.abs(again))) <= limit
    if case.products == "int8":
        assert_rows(int8.RowCodes(straight, largest), int8.round_rows(n))
    elif case.products == "bf16":
        assert straight.dtype == x.dtype
        # Triton's interpreter drops the bits that a cast to BF16 rounds.
        np.testing.assert_allclose(np.float32(straight), n, rtol=2**-7, atol=1e-6)
    else:
        assert largest is None
        assert_codes(straight, both_layouts(n, scale, E4M3)[0])
    assert_codes(transposed, both_layouts(again, scale, E4M3, stream)[1])

    dn = numbers(4, shape).astype(jnp.float32)
    residual = numbers(8, shape) if case.residual else None
    dx, d_norm = norm.norm_backward(blocks, stats, of, dn, residual, size)
    want, d_want = norm.normalize_backward(values, expected, of, dn)
    if residual is not None:
        want = want + residual.astype(jnp.float32)
    largest = float(jnp.max(jnp.abs(want)))
    np.testing.assert_allclose(dx, want, atol=1e-5 * largest)
    for a, b in zip(jax.tree.leaves(d_norm), jax.tree.leaves(d_want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(b))))


def hidden_and_blocks(shape, count, size, stochastic):
    """Inputs of an activation, and what is saved of them."""
    hidden = [numbers(i, shape, spread=1.0) for i in range(count)]
    how = {"size": size, "stochastic": stochastic}
    return hidden, [to_blocks(h, antithetic=i > 0, **how) for i, h in enumerate(hidden)]


def check_exact_activation(shape, act, count, size=16, *, stochastic=False):
    hidden, exact = hidden_and_blocks(shape, count, size, stochastic)
    kept, codes, maxima = activation.activation_forward(
        hidden, act, E4M3, size, exact=True, stochastic=stochastic
    )
    assert_same_bytes(kept, exact)
    a = activation.activate(hidden, act)
    again = activation.activate([from_blocks(b, size=size) for b in exact], act)
    largest = jnp.maximum(jnp.abs(a), jnp.abs(again))
    np.testing.assert_allclose(jnp.max(maxima), jnp.max(largest), rtol=1e-5)
    scale = gemm.tensor_scale(jnp.max(maxima), E4M3)
    got = activation.activation_rescale(codes, maxima, scale, size)
    # Rounded twice where the second code is subnormal, and then half a code further off at most.
    want = np.float64(gemm.operand(a, E4M3, scale=scale).values)
    subnormal = np.abs(want) < 2.0 ** format_of(E4M3).min_exponent
    off = np.abs(np.float64(got) - want)
    assert np.max(off, where=subnormal, initial=0) <= format_of(E4M3).tiny
    assert_codes(np.where(subnormal, 0, got), np.where(subnormal, 0, want).astype(E4M3))


def check_exact_activation_in_int8(shape, act, count, size=16):
    """Codes are rounded twice: with the scale of 32 columns, then with that of the row."""
    rng, columns = np.random.default_rng(1), shape[-1]
    row_scale = jnp.asarray(rng.uniform(1e-4, 1e-3, shape[:-1]), jnp.float32)
    products = [
        int8.Product(
            jnp.asarray(rng.integers(-(10**4), 10**4, shape), jnp.int32),
            row_scale,
            jnp.asarray(rng.uniform(0.1, 1, columns), jnp.float32),
        )
        for _ in range(count)
    ]
    hidden = [product.scaled(jnp.float32) for product in products]
    how = {"exact": True, "stochastic": True}
    want, _, _ = activation.activation_forward(hidden, act, E4M3, size, **how)
    kept, codes, maxima = activation.activation_forward(
        products, act, E4M3, size, products="int8", **how
    )
    for_values = activation.activation_forward(hidden, act, E4M3, size, products="int8", **how)
    assert_codes_of_int8(codes, for_values[1])
    assert_same_bytes(kept, want)
    largest = jnp.max(maxima, axis=-1)
    rows = int8.RowCodes(activation.activation_rescale(codes, maxima, largest, size), largest)
    a = np.float64(activation.activate(hidden, act))
    assert np.all(np.max(np.abs(a), axis=-1) <= 1.00001 * np.float64(largest))
    off = np.abs(np.float64(rows.codes) - a / np.float64(rows.scale)[..., None])
    assert np.max(off) < 1.001  # half a step of each scale
    assert np.sqrt(np.mean(off**2)) < 1.3 * 12**-0.5


def check_activation(shape, act, count, size=16, *, stochastic=False):
    hidden, exact = hidden_and_blocks(shape, count, size, stochastic)
    kept, none, maxima = activation.activation_forward(
        hidden, act, E4M3, size, exact=False, stochastic=stochastic
    )
    assert none is None
    assert_same_bytes(kept, exact)
    values = [from_blocks(b, size=size) for b in exact]
    a = activation.activate(values, act)
    np.testing.assert_allclose(jnp.max(maxima), jnp.max(jnp.abs(a)), rtol=1e-5)
    scale = gemm.tensor_scale(jnp.max(maxima), E4M3)
    assert_codes(
        activation.activation_cast(kept, act, scale, size),
        gemm.operand(a, E4M3, scale=scale).values,
    )

    da = numbers(7, shape, spread=1.0)
    largest = jnp.max(jnp.abs(da), axis=-1).astype(jnp.float32)
    bounds = activation.gradient_bounds(kept, largest, act)
    scales = [gemm.tensor_scale(bound, E5M2) for bound in bounds]
    again, codes, _ = activation.activation_backward(
        kept, da, act, scale, scales, size, E5M2, stochastic=stochastic
    )
    stream = "inputs" if stochastic else None
    assert_codes(again, both_layouts(a, scale, E4M3, stream)[1])
    gradients = activation.activate_backward(values, da, act)
    for pair, d, bound, s in zip(codes, gradients, bounds, scales, strict=True):
        assert jnp.max(jnp.abs(d)) <= bound
        # The reference's tanh ends 2^-24 below 1, and the derivative multiplies that by up to 2^5.
        reference = both_layouts(d, s, E5M2, "gradients" if stochastic else None)
        for got, want in zip(pair, reference, strict=True):
            off = np.abs(np.float64(np.asarray(got)) - np.float64(np.asarray(want)))
            step = np.abs(np.float64(np.asarray(want))) * 0.25
            np.testing.assert_array_less(off, 1.001 * step + FAR_FROM_ZERO)
            assert np.mean(off > FAR_FROM_ZERO) <= SLACK


dtypes = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["E4M3", "E5M2"])
roundings = pytest.mark.parametrize("stochastic", [False, True], ids=["to nearest", "stochastic"])
streams = pytest.mark.parametrize("stream", [None, "gradients", "inputs"], ids=str)
# Many decoded values are 1 exactly, which a limit of 1 leaves as they are.
acts = pytest.mark.parametrize(
    "act", [*map(Limited, ACTIVATIONS), Limited("silu", 1.0), Limited("relu2", 0.7)], ids=str
)
counts = pytest.mark.parametrize("count", [1, 2])


class LayerLaws:
    """Each kernel gives what its reference gives, on arrays of all `shapes`."""

    shapes = SMALL
    hidden = SMALL[1:2]  # of activations, which take the interpreter long
    heads = ROTARY_CASES

    @streams
    @dtypes
    def test_cast(self, dtype, stream):
        for shape in self.shapes:
            check_cast(shape, dtype, stream)

    @streams
    @dtypes
    def test_rotary(self, dtype, stream):
        for shape, heads, head, per_sequence in self.heads:
            check_rotary(shape, heads, head, dtype, per_sequence=per_sequence, stream=stream)

    @pytest.mark.parametrize("case", NORMS, ids=str)
    def test_norm(self, case):
        for shape in self.shapes:
            check_norm(shape, case)

    @roundings
    @acts
    @counts
    def test_activation(self, act, count, stochastic):
        for shape in self.hidden:
            check_activation(shape, act, count, stochastic=stochastic)
            check_exact_activation(shape, act, count, stochastic=stochastic)

    @acts
    @counts
    def test_exact_activation_in_int8(self, act, count):
        for shape in self.hidden:
            check_exact_activation_in_int8(shape, act, count)

    def test_int8(self):
        for shape in self.shapes:
            check_int8_columns(shape)
            check_int8_rows(shape)
