"""How long products with INT4 weights take beside BF16 and 8 bits, all read from HBM.

    python -m experiments.int4_speed                          on one GPU
    python -m experiments.int4_speed --shapes 0 1 --rows 1 16
    python -m experiments.int4_speed --schedules              tries schedules of the kernel
    python -m experiments.int4_speed --small                  tiny sizes anywhere

A program multiplies the same x [rows, K] with one weight [N, K] after another, in turns with
programs of other ways. Weights rotate through more memory than the GPU's L2 cache has.

    codes       a product of codes that exist, of cuBLASLt
    expanded    INT4 codes are expanded to FP8 codes, which cuBLASLt multiplies
    kernel      INT4 codes times FP8 codes in the Triton kernel; the next launch adds up the parts
    added       likewise, and the last programs add the parts to the residual stream
    layer       `ops.quantized_linear`: rounds x, multiplies and scales
    jnp.int4    x in BF16, codes in JAX's dtype and a scale for each group, through XLA

`kernels.int4.FEW_ROWS` should be the most rows with which "kernel" wins over "expanded".
"""

import argparse
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from coat_jax import ops
from coat_jax.kernels import gemm, int4
from coat_jax.kernels.dispatch import choose
from coat_jax.kernels.launch import Schedule
from coat_jax.numerics import four_bits
from coat_jax.numerics.formats import E4M3
from experiments import records, rotation
from experiments.command import parser_of
from experiments.rotation import BY_CUBLAS, BY_XLA, Case, Program, nbytes

# Of Llama-2-7B, N x K: out, fused query, key and value, gate, fused gate and up, down.
SHAPES = ((4096, 4096), (12288, 4096), (11008, 4096), (22016, 4096), (4096, 11008))
SMALL = ((256, 128), (128, 256))
ROWS = (1, 4, 16, 32, 64, 128, 1024)
FP8_ROWS = 16  # XLA pads fewer for cuBLASLt, in launches of their own
MOST_KERNEL_ROWS = 128
LAYER_ROWS = (1, 16, 64)  # where XLA may use its own Triton GEMMs: these take long to compile
# Of the kernel: channels of a block, warps, stages, groups of a step, and how many programs there
# should be.
SCHEDULES = (
    *itertools.product((64, 128, 256), (4, 8), (3, 4), (1, 2), (256, 512)),
    *itertools.product((64, 128), (4, 8), (3,), (4,), (512,)),
)
SCHEDULE_ROWS = (16, 64)
SHOWN = 10  # lines


class Way(NamedTuple):
    """A way to multiply."""

    x: Any  # its dtype
    weight: Callable[[Array, int, int], Any]  # of a key, N and K
    multiply: Callable[[Array, Any], Array]
    options: dict[str, Any] = BY_CUBLAS
    least_rows: int = 1
    prepare: Callable[[Array], Any] = jnp.asarray  # x, which is not timed


def main() -> None:
    """Measures each shape and number of rows, and writes the results after each."""
    options = arguments().parse_args()
    if options.small:
        rotation.MOST_CALLS = 4
    shapes = SMALL if options.small else SHAPES
    chosen = [shapes[i] for i in options.shapes or range(len(shapes))]
    rows = options.rows or (SCHEDULE_ROWS if options.schedules else ROWS)
    measure = tuned if options.schedules else measured
    path = options.out / ("int4_schedules.json" if options.schedules else "int4_speed.json")
    cases: list[Case] = []
    for (n, k), m in itertools.product(chosen, rows):
        found = measure(n, k, m)
        cases += [{"of": f"{n} x {k}, {m} rows", **case} for case in found]
        print(cases[-1]["of"], *rotation.lines(found, SHOWN), sep="\n", flush=True)
        records.write(path, {"few_rows": int4.FEW_ROWS, "cases": cases})
    if options.schedules:
        print(*rotation.ranking(cases), sep="\n")


def arguments() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--shapes", nargs="+", type=int, help="numbers of shapes, from 0 on")
    add("--rows", nargs="+", type=int, help="rows of x")
    add("--schedules", action="store_true", help="try schedules of the kernel")
    add("--small", action="store_true", help="tiny sizes, to try this script")
    return parser


# --- Ways to multiply ------------------------------------------------------------------------


def ways(rows: int) -> dict[str, Way]:
    """Those for as many rows."""
    found = {
        "BF16": Way(jnp.bfloat16, _bf16_weight, jnp.matmul),
        "FP8 codes": Way(E4M3, _fp8_weight, _codes, least_rows=FP8_ROWS),
        "INT8 codes": Way(jnp.int8, _int8_weight, _codes),
        "W4A8 expanded": Way(E4M3, _int4_weight, _expanded, least_rows=FP8_ROWS),
    }
    if rows <= MOST_KERNEL_ROWS:
        found["W4A8 kernel"] = Way(E4M3, _int4_weight, _int4_kernel, prepare=_rows)
    if rows <= int4.ADDED_ROWS:
        found["W4A8 added"] = Way(E4M3, _int4_weight, _int4_added, prepare=_rows)
    if rows in LAYER_ROWS:
        layer = ops.quantized_linear
        found |= {
            "FP8 layer": Way(jnp.bfloat16, _fp8_weight, layer, BY_XLA),
            "INT8 layer": Way(jnp.bfloat16, _int8_weight, layer, BY_XLA),
            "W4A8 layer": Way(jnp.bfloat16, _int4_weight, layer, BY_XLA),
            "jnp.int4": Way(jnp.bfloat16, _jnp_int4_weight, _jnp_int4, BY_XLA),
        }
    return found


def _bf16_weight(key: Array, n: int, k: int) -> Array:
    return jax.random.normal(key, (k, n), jnp.bfloat16)


def _fp8_weight(key: Array, n: int, k: int) -> ops.Quantized:
    codes = 30 * jax.random.normal(key, (n, k), jnp.bfloat16)
    return ops.Quantized(codes.astype(E4M3), jnp.ones(n))


def _int8_weight(key: Array, n: int, k: int) -> ops.Quantized:
    codes = 30 * jax.random.normal(key, (n, k), jnp.bfloat16)
    return ops.Quantized(codes.astype(jnp.int8), jnp.ones(n))


def _int4_weight(key: Array, n: int, k: int) -> ops.Quantized:
    codes = jax.random.bits(key, (n, k // 2), jnp.uint8)
    return ops.Quantized(codes, jnp.ones((n, k // int4.GROUP), jnp.bfloat16))


def _jnp_int4_weight(key: Array, n: int, k: int) -> tuple[Array, Array]:
    shape = n, k // int4.GROUP, int4.GROUP
    codes = jax.random.bits(key, shape, jnp.uint8) % 16
    return (codes.astype(jnp.int8) - 8).astype(jnp.int4), jnp.ones(shape[:2], jnp.bfloat16)


def _codes(x: Array, weight: ops.Quantized) -> Array:
    return gemm.product_of_codes(x, weight.codes, jnp.bfloat16)


def _expanded(x: Array, weight: ops.Quantized) -> Array:
    expand = int4.expand if choose(None) == "triton" else four_bits.expand
    codes, scale = expand(weight.codes, weight.scale)
    y = _codes(x, ops.Quantized(codes, scale))
    return (y * scale).astype(jnp.bfloat16)


def _rows(x: Array) -> int4.Rows:
    """What generation has after a norm."""
    return int4.Rows.of(x, jnp.ones(x.shape[0]))


def _int4_kernel(rows: int4.Rows, weight: ops.Quantized) -> Array:
    if jax.default_backend() != "gpu":  # where the kernel cannot run
        return _expanded(rows.codes, weight)
    return int4.products_of_few_rows(rows, [weight.in_int4()])[0].parts


def _int4_added(rows: int4.Rows, weight: ops.Quantized) -> Array:
    if jax.default_backend() != "gpu":
        return _expanded(rows.codes, weight)
    x = jnp.zeros((rows.codes.shape[0], weight.codes.shape[0]), jnp.bfloat16)
    return int4.add_product(x, rows, weight.in_int4())


def _jnp_int4(x: Array, weight: tuple[Array, Array]) -> Array:
    codes, scale = weight
    values = (codes.astype(x.dtype) * scale[..., None]).reshape(codes.shape[0], -1)
    return jnp.matmul(x, values.T, preferred_element_type=jnp.float32).astype(x.dtype)


# --- Measurement -----------------------------------------------------------------------------


def measured(n: int, k: int, m: int) -> list[Case]:
    """Every way, in turns."""
    named = ways(m)
    weights = [copies(way, n, k) for way in named.values()]
    programs = [
        products(way, of_way, k, m) for way, of_way in zip(named.values(), weights, strict=True)
    ]
    times = rotation.times_us(programs)
    return [
        {"way": name, "us": us, "bytes": nbytes(of_way[0])}
        for name, us, of_way in zip(named, times, weights, strict=True)
    ]


def tuned(n: int, k: int, m: int) -> list[Case]:
    """The kernel with each schedule, in turns; the fastest first."""
    way, programs = ways(m)["W4A8 kernel"], []
    weights = copies(way, n, k)
    before = int4.SCHEDULE, int4.TOGETHER, int4.PROGRAMS
    for channels, warps, stages, together, count in SCHEDULES:
        int4.SCHEDULE = Schedule(channels, before[0].columns, warps, stages)
        int4.TOGETHER, int4.PROGRAMS = (together, together), count
        programs.append(products(way, weights, k, m))
    int4.SCHEDULE, int4.TOGETHER, int4.PROGRAMS = before
    words = "{} channels, {} warps, {} stages, {} groups a step, {} programs"
    cases = [
        {"way": words.format(*schedule)} | {"us": us, "bytes": nbytes(weights[0])}
        for schedule, us in zip(SCHEDULES, rotation.times_us(programs), strict=True)
    ]
    return sorted(cases, key=lambda case: case["us"])


def copies(way: Way, n: int, k: int) -> list[Any]:
    """As many different weights as do not fit into the L2 cache."""
    draw = jax.jit(way.weight, static_argnums=(1, 2))
    first = draw(jax.random.key(0), n, k)
    count = rotation.operands_needed(nbytes(first))
    return [first, *(draw(jax.random.key(i), n, k) for i in range(1, count))]


def products(way: Way, weights: list[Any], k: int, m: int) -> Program:
    """A program that multiplies one x with weight after weight."""
    shape = max(m, way.least_rows), k
    x = (30 * jax.random.normal(jax.random.key(1), shape)).astype(way.x)
    size = nbytes(weights[0])
    return rotation.repeat(way.multiply, way.prepare(x), weights, size, options=way.options)


if __name__ == "__main__":
    main()
