"""How long attention of one new token to stored keys and values takes, by their format.

    python -m experiments.past_attention_speed                on one GPU
    python -m experiments.past_attention_speed --schedules --texts 1 16
    python -m experiments.past_attention_speed --small        tiny sizes anywhere

    XLA       the reference of `kernels.attention_to_past`
    kernel    its Triton kernel, and the sum of its parts

Heads have 128 columns: 32 of them (Llama 2), or 8 with 4 query heads each (Llama 3). All slots
are filled. Caches of several layers together do not fit into the GPU's L2 cache.
"""

import argparse
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from coat_jax import ops
from coat_jax.kernels import attention_to_past as kernels
from coat_jax.numerics.cache_formats import CacheFormat, StoredHeads, encode_heads
from experiments import records, rotation
from experiments.command import parser_of
from experiments.rotation import Case, Program, nbytes

HEADS = ((32, 1), (8, 4))  # KV heads, and query heads of each
WIDTH = 128
SLOTS = (1056, 8192)
TEXTS = (1, 16, 64)
FORMATS: dict[str, CacheFormat | None] = {
    "BF16": None,
    "INT8": "int8",
    "FP8": "fp8",
    "INT4": "int4",
}

# Of the kernel: slots of a block, warps and stages, and how many programs there should be.
LOOPS = ((2, 2), (2, 3), (4, 2), (4, 3), (8, 2), (8, 3))
PROGRAMS = (264, 528, 1056, 4096, 8192)  # 64 texts with 32 KV heads are 2048
SCHEDULES = tuple(
    (block, *loop, programs)
    for block, loop, programs in itertools.product((32, 64, 128), LOOPS, PROGRAMS)
)
SHOWN = 8  # lines


def main() -> None:
    """Measures each size of a cache, and writes the results after each."""
    options = arguments().parse_args()
    if options.small:
        rotation.MOST_CALLS, options.slots, options.texts = 2, [65], [2]
    of_heads = HEADS if options.heads is None else [HEADS[i] for i in options.heads]
    name = "past_attention_schedules" if options.schedules else "past_attention_speed"
    measure = tuned if options.schedules else measured
    cases: list[Case] = []
    for heads, texts, slots in itertools.product(of_heads, options.texts, options.slots):
        for found in measure(heads, texts, slots, options.formats):
            cases += found
            print(found[0]["of"], *rotation.lines(found, SHOWN), sep="\n", flush=True)
            records.write(options.out / f"{name}.json", {"width": WIDTH, "cases": cases})
    if options.schedules:
        print(*rotation.ranking(cases), sep="\n")


def arguments() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--heads", nargs="+", type=int, choices=range(len(HEADS)), help="0 for Llama 2, 1 for 3")
    add("--texts", nargs="+", type=int, default=TEXTS, help="how many at a time")
    add("--slots", nargs="+", type=int, default=SLOTS, help="of each text")
    add("--formats", nargs="+", choices=FORMATS, default=tuple(FORMATS), help="of the cache")
    add("--schedules", action="store_true", help="try schedules of the kernel")
    add("--small", action="store_true", help="tiny sizes, to try this script")
    return parser


def measured(
    heads: tuple[int, int], texts: int, slots: int, formats: list[str]
) -> list[list[Case]]:
    """XLA and the kernel on every format, in turns."""
    named, programs, sizes = [], [], []
    for name, how in itertools.product(formats, ("XLA", "kernel")):
        past, size = cache(heads, texts, slots, FORMATS[name])
        named.append(f"{name}, {how}")
        programs.append(attentions(heads, past, size, how))
        sizes.append(size)
    times = rotation.times_us(programs)
    of = _words(heads, texts, slots)
    return [
        [
            {"of": of, "way": way, "us": us, "bytes": size}
            for way, us, size in zip(named, times, sizes, strict=True)
        ]
    ]


def tuned(heads: tuple[int, int], texts: int, slots: int, formats: list[str]) -> list[list[Case]]:
    """The kernel with each schedule on each format, in turns; the fastest first."""
    before = kernels.loop_of, kernels.PROGRAMS
    found = []
    for name in formats:
        past, size = cache(heads, texts, slots, FORMATS[name])
        programs = []
        for *loop, count in SCHEDULES:
            kernels.loop_of = lambda *_, loop=loop: kernels.Loop(*loop)
            kernels.PROGRAMS = count
            programs.append(attentions(heads, past, size, "kernel"))
        kernels.loop_of, kernels.PROGRAMS = before
        of = f"{_words(heads, texts, slots)}, {name}"
        cases = [
            {"of": of, "way": "{} slots, {} warps, {} stages, {} programs".format(*schedule)}
            | {"us": us, "bytes": size}
            for schedule, us in zip(SCHEDULES, rotation.times_us(programs), strict=True)
        ]
        found.append(sorted(cases, key=lambda case: case["us"]))
    return found


def _words(heads: tuple[int, int], texts: int, slots: int) -> str:
    return f"{texts} texts, {heads[0]} KV heads, {heads[1]} queries of each, {slots} slots"


@functools.lru_cache(maxsize=2)
def cache(
    heads: tuple[int, int], texts: int, slots: int, format: CacheFormat | None
) -> tuple[ops.Past, int]:
    """Keys and values of several layers, and the bytes of one. All texts and layers are alike."""

    @functools.partial(jax.jit, static_argnums=1)
    def draw(key: Array, layers: int) -> StoredHeads:
        x = jax.random.normal(key, (1, 1, heads[0], slots, WIDTH), jnp.bfloat16)
        stored = encode_heads(x, format)
        return jax.tree.map(
            lambda one: jnp.broadcast_to(one, (layers, texts, *one.shape[2:])), stored
        )

    keys = jax.random.split(jax.random.key(0))
    size = 2 * nbytes(jax.eval_shape(lambda key: draw(key, 1), keys[0]))
    layers = rotation.operands_needed(size)
    return ops.Past(*(draw(key, layers) for key in keys)), size


def attentions(heads: tuple[int, int], past: ops.Past, size: int, how: str) -> Program:
    """A program that attends to layer after layer."""
    layers, texts, _, slots, _ = past.keys.codes.shape
    q = jax.random.normal(jax.random.key(1), (texts, 1, heads[0] * heads[1], WIDTH), jnp.bfloat16)
    first, filled = jnp.zeros(texts, jnp.int32), jnp.int32(slots - 1)
    new = jax.tree.map(lambda stored: stored[0, :, :, -1:], past)
    runs_kernel = how == "kernel" and jax.default_backend() == "gpu"

    def attend(x: Any, of: tuple[ops.Past, int]) -> Array:
        q, new, first, filled = x
        return ops.attention_to_past(
            q, new, ops.Visible(*of, first, filled),
            implementation="triton" if runs_kernel else "xla",
        )  # fmt: skip

    def take(past: ops.Past, i: int) -> tuple[ops.Past, int]:
        return past, i % layers

    return rotation.repeat(attend, (q, new, first, filled), past, size, take=take)


if __name__ == "__main__":
    main()
