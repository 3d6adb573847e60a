"""FP32 arithmetic with approximate instructions.

If FAST, base-2 logarithm, power, root and reciprocal are one instruction each. Their relative
error is 2^-22, and they flush denormals to zero. Triton's interpreter has no inline assembly: FAST
is off there.
"""

import triton
import triton.language as tl

FAST = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def log2(x):
    """log2(x); minus infinity for denormals."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(tl.where(x < 1.1754943508222875e-38, 0.0, x))


@triton.jit
def exp2(x):
    """2^x."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def sqrt(x):
    """The square root."""
    if FAST:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.sqrt(x)


@triton.jit
def rsqrt(x):
    """1 / sqrt(x)."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / tl.sqrt(x)


@triton.jit
def reciprocal(x):
    """1 / x."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x


@triton.jit
def reciprocal_of_integer(x):
    """1 / x to within 0.4 %: an integer subtraction (6 %) and one Newton step."""
    if FAST:
        guess = (0x7EF127EA - x.to(tl.uint32, bitcast=True)).to(tl.float32, bitcast=True)
        return guess * (2.0 - x * guess)
    return 1.0 / x


@triton.jit
def floor_positive(x):
    """floor(x) for 0 <= x < 2^22: adding 2^23 while rounding towards zero drops the fraction."""
    if FAST:
        return tl.inline_asm_elementwise(
            "{.reg .f32 t; add.rz.f32 t, $1, 0f4B000000; sub.f32 $0, t, 0f4B000000;}",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.floor(x)


@triton.jit
def clip(x, limit):
    """x with its magnitude limited; NaN stays NaN."""
    if FAST:
        return tl.inline_asm_elementwise(
            "min.NaN.xorsign.abs.f32 $0, $1, $2;",
            "=f,f,f",
            [x, limit],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    clipped = tl.minimum(tl.maximum(x, -limit), limit)
    return tl.where(x == x, clipped, x)  # noqa: PLR0124


@triton.jit
def copysign(x, signed):
    """x >= 0 with the sign of another number."""
    sign = signed.to(tl.uint32, bitcast=True) & 0x80000000
    return (x.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
