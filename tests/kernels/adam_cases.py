"""The AdamW kernel against its reference: one table for the interpreter and for the GPU.

How far they may differ: the kernel's arithmetic is that of FP32 with approximate functions
(2^-22 relative each, after logarithms of up to 40 times that: hence 1e-5 for what is stored
in FP32). Where the exact value of a code lies within that of the middle between two codes, the
kernel may choose the other one; stochastic rounding compares with a probability that the
kernel computes to 0.2 %. So codes may differ by one, in few places. Where 16 k lies on the edge of
a whole number, a group may get the neighbouring exponent, and with it other codes.
"""

import dataclasses
import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.kernels.adam import Hyper, Leaf, LeafResult, Settings
from coat_jax.kernels.adam_launch import BUCKET, adam_step
from coat_jax.numerics import corrections, noise
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.storage import DIRECTION, LOGARITHM, Storage

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
ALL_FP8 = Storage(min_size=0)  # every leaf in 8 bits
EXPANDED = Storage(min_size=0, first=E4M3, second=E4M3)
NEAREST = Storage(min_size=0, stochastic=False)
IN_E5M2 = Storage(min_size=0, first=E5M2, second=E5M2)
HYPER = Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.1, 1.0)
SKIP, NO_SKIP = HYPER._replace(skip=np.bool_(True)), HYPER._replace(skip=np.bool_(False))
ROUNDED = Settings(ALL_FP8, round_params=True)
NESTEROV = Settings(ALL_FP8, nesterov=True)
HOSTILE, SEVERAL_BLOCKS = ((16, 128),), ((40, 256),)
MIXED = ((4, 128), (2, 256), (128,), (1, 128), (3, 100), (8, 128), (7, 128), (16, 128), (5, 300))


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    shapes: tuple[tuple[int, ...], ...] = ((4, 128),)
    param: str | None = "float32"
    grad: str = "float32"
    hyper: Hyper = HYPER._replace(b2=0.999)
    settings: Settings = Settings(ALL_FP8)
    count: int = 7
    decayed: bool = True
    direction: str | None = None  # its dtype; by default that of the gradients
    corrected: bool = False  # BF16 parameters have corrections
    hostile: bool = False  # zeros, NaN, infinities, the tiny and the huge among the gradients


def stored(name: str, **storage: Any) -> Case:
    """A case of several blocks whose moments are stored in another way."""
    return Case(name, SEVERAL_BLOCKS, settings=Settings(dataclasses.replace(EXPANDED, **storage)))


def hostile(
    name: str, param: str = "float32", settings: Settings | None = None, **hyper: float
) -> Case:
    """A case with hostile gradients."""
    settings = Settings(ALL_FP8) if settings is None else settings
    return Case(
        name, HOSTILE, param, hyper=HYPER._replace(**hyper), settings=settings, hostile=True
    )


def bf16(name: str, shapes: Any = ((4, 128),), grad: str = "float32", **fields: Any) -> Case:
    """A case of BF16 parameters with corrections."""
    return Case(name, shapes, "bfloat16", grad, corrected=True, **fields)


CASES = [
    Case("several blocks", SEVERAL_BLOCKS),
    stored("E4M3"),
    stored("E4M3 and logarithms", second=LOGARITHM),
    stored("directions and E4M3", first=DIRECTION),
    stored("E4M3, nearest", stochastic=False),
    Case("rank 3", ((2, 3, 256),)),
    Case("scalar", ((),)),
    Case("short row", ((3,),)),
    Case("uneven rows", ((5, 300),)),
    Case("uneven rows that fill blocks", ((16, 64),)),
    Case("one column", ((300, 1),)),
    Case("bfloat16", param="bfloat16", grad="bfloat16"),
    Case("float16", param="float16", grad="float16"),
    Case("float32 with bfloat16 gradients", grad="bfloat16"),
    Case("first step", count=1),
    Case("late step", count=1_000_000),
    Case("no weight decay on this leaf", decayed=False),
    Case("b1 = 0", hyper=HYPER._replace(b1=0.0)),
    Case("E4M3, slow first moment", hyper=HYPER._replace(b1=0.95), settings=Settings(EXPANDED)),
    Case("slow decays", hyper=HYPER._replace(b1=0.99, b2=0.9999), count=500),
    Case("E5M2", settings=Settings(IN_E5M2)),
    Case("E5M2, fast first moment", hyper=HYPER._replace(b1=0.8), settings=Settings(IN_E5M2)),
    Case("no memory of squares, no step", hyper=HYPER._replace(learning_rate=0.0, b2=0.0)),
    Case("eps_root", hyper=HYPER._replace(eps_root=1e-6)),
    Case("gradients scaled", hyper=HYPER._replace(grad_scale=0.125)),
    Case("skipped", hyper=SKIP),
    Case("not skipped", hyper=NO_SKIP),
    Case("nesterov", settings=NESTEROV),
    Case("nearest", settings=Settings(NEAREST)),
    Case("seeded", settings=Settings(Storage(min_size=0, seed=2**31 + 5))),
    Case("groups of 16", ((4, 256),), settings=Settings(Storage(min_size=0, group_size=16))),
    Case("groups of 1024", ((3, 1024),), settings=Settings(Storage(min_size=0, group_size=1024))),
    Case("direction only", param=None, grad="bfloat16"),
    Case("direction in FP32", param=None, grad="bfloat16", direction="float32"),
    Case("direction, nesterov", param=None, settings=NESTEROV),
    Case("rounded parameters", param="bfloat16", grad="bfloat16", settings=ROUNDED),
    hostile("hostile gradients"),
    hostile("hostile, eps = 0", eps=0.0),
    hostile("hostile gradients scaled down", grad_scale=1e-19),
    hostile("hostile gradients scaled to nothing", grad_scale=1e-25),
    hostile("hostile gradients scaled by zero", grad_scale=0.0),
    hostile("hostile gradients scaled far up", grad_scale=1e10),
    hostile("E4M3, hostile gradients", settings=Settings(EXPANDED)),
    hostile("hostile, rounded parameters", "bfloat16", ROUNDED),
    Case("hostile, uneven", ((16, 100),), hostile=True),
    bf16("corrected", SEVERAL_BLOCKS, "bfloat16"),
    bf16("corrected, skipped", hyper=SKIP),
    bf16("corrected bucket and rest", MIXED),
    bf16("corrected, hostile", HOSTILE, hostile=True),
    Case("uneven bucket", tuple((i + 1, 100 + i) for i in range(BUCKET))),
    Case("bucket and rest", ((4, 128),) * (BUCKET + 2)),
    Case(
        "FP32 leaves between",
        ((4, 128), (5,), (256, 128)),
        settings=Settings(Storage(min_size=512)),
    ),
]


def leaves_of(case: Case, seed: int = 0) -> list[Leaf]:
    """Random leaves with moments as after some training."""
    rng = np.random.default_rng(seed)
    storage = case.settings.storage

    def normal(shape: tuple[int, ...], scale: float) -> jax.Array:
        spread = np.exp(rng.normal(size=shape))
        return jnp.asarray((rng.normal(size=shape) * spread * scale).astype(np.float32))

    leaves = []
    for shape in case.shapes:
        grad, mu, nu = normal(shape, 1e-2), normal(shape, 1e-2), jnp.square(normal(shape, 1e-2))
        if case.hostile:
            grad, mu, nu = (with_hostile_rows(x) for x in (grad, mu, nu))
        param = None if case.param is None else normal(shape, 1.0)
        correction = None
        if case.corrected:
            param, correction = corrections.split(param, jnp.uint32(128))
        leaves.append(
            Leaf(
                None if param is None else param.astype(case.param),
                grad.astype(case.grad),
                *written(storage, mu, nu),
                correction,
            )
        )
    return leaves


def with_hostile_rows(x: jax.Array) -> jax.Array:
    """Rows of zeros, with a zero, a NaN, an infinity, a tiny and a huge member."""
    assert x.shape[0] >= 8  # JAX would drop what is beyond the last row
    x = x.at[0].set(0.0).at[1, 3].set(0.0).at[2, :5].set(0.0)
    x = x.at[3, 7].set(jnp.nan).at[4, 0].set(jnp.inf)
    return x.at[5, 9].set(1e-30).at[6, 1].set(1e15).at[7].set(1e-3)


def check(case: Case) -> None:
    """Steps through XLA and through Triton, and compares everything."""
    leaves = leaves_of(case)

    def step(implementation: str) -> list:
        @jax.jit
        def run(leaves: list[Leaf], count: jax.Array) -> list:
            decayed = [case.decayed] * len(leaves)
            return adam_step(
                leaves,
                count,
                case.hyper,
                case.settings,
                decayed=decayed,
                dtypes=None if case.direction is None else [np.dtype(case.direction)] * len(leaves),
                implementation=implementation,
            )

        return run(leaves, jnp.int32(case.count))

    for leaf, expected, got in zip(leaves, step("xla"), step("triton"), strict=True):
        result_dtype = case.direction or case.grad if leaf.param is None else leaf.param.dtype
        assert got.result.dtype == result_dtype
        if case.corrected:
            _compare_corrected(expected, got, 1e-4 if case.hostile else 1e-5)
            if case.hyper.skip is not False:
                np.testing.assert_array_equal(got.correction, leaf.correction)
        else:
            assert got.correction is None
        _compare_results(expected.result, got.result, 1e-4 if case.hostile else 1e-5)
        for old, new in ((expected.mu, got.mu), (expected.nu, got.nu)):
            compare_moments(old, new, case.settings.storage.group_size)


def one_step(
    implementation: str, leaf: Leaf, count: int, hyper: Hyper, settings: Settings
) -> tuple[jax.Array, Leaf]:
    """The result of a step of one leaf, and the leaf as the next step takes it."""
    step = _by_xla if implementation == "xla" else _step
    return step(leaf, jnp.int32(count), hyper, settings, implementation)


def _step(
    leaf: Leaf, count: jax.Array, hyper: Hyper, settings: Settings, implementation: str
) -> tuple[jax.Array, Leaf]:
    (stepped,) = adam_step([leaf], count, hyper, settings, implementation=implementation)
    later = {"mu": stepped.mu, "nu": stepped.nu, "correction": stepped.correction}
    return stepped.result, leaf._replace(**later)


_by_xla = jax.jit(_step, static_argnums=(2, 3, 4))


def fresh_leaf(param: jax.Array | None, grad: jax.Array, storage: Storage = ALL_FP8) -> Leaf:
    """A leaf before its first step."""
    zeros = jnp.zeros(grad.shape)
    return Leaf(param, grad, *written(storage, zeros, zeros))


@partial(jax.jit, static_argnums=0)
def written(storage: Storage, m: jax.Array, v: jax.Array) -> tuple[Expanded, Expanded]:
    """Both moments as `storage` holds them, rounded to nearest."""
    nearest = dataclasses.replace(storage, stochastic=False)
    return nearest.write_moments(m, v, noise.leaf_key(0, 0, 0), 0.9, 0.999)


def _compare_results(expected: jax.Array, got: jax.Array, rtol: float) -> None:
    """To rtol in FP32, and in 16 bits to one unit in the last place where rounding turned over.

    rtol is 1e-5; ten times that where a moment is far out, since the absolute error of a logarithm
    grows with it.
    """
    rtol = max(rtol, float(jnp.finfo(expected.dtype).eps))
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(expected, np.float32), rtol=rtol, atol=1e-7
    )


def _compare_corrected(expected: LeafResult, got: LeafResult, rtol: float) -> None:
    """To rtol as in FP32, and where rounding turned over to one place of 24 bits."""
    joined, wanted = (
        np.asarray(corrections.join(s.result, s.correction), np.float64) for s in (got, expected)
    )
    np.testing.assert_allclose(joined, wanted, rtol=rtol + 2.0**-15, atol=1e-7)
    assert np.mean(joined == wanted) > 0.5  # most do not turn over


def compare_moments(expected: Expanded, got: Expanded, group_size: int) -> None:
    """Neighbouring codes at the most, and that for at most 1 % of them (or two)."""
    # What is left of a moment and a gradient that cancel has their errors.
    cancelled = 1e-6 * np.max(expected.amax, initial=0)
    np.testing.assert_allclose(got.amax, expected.amax, rtol=1e-5, atol=min(cancelled, 1e-6))
    if expected.codes.dtype == jnp.float32:
        np.testing.assert_allclose(got.codes, expected.codes, rtol=1e-6)
        return
    sixteenths = [np.asarray(e.exponent_x16, int) for e in (expected, got)]
    assert np.abs(sixteenths[0] - sixteenths[1]).max(initial=0) <= 1
    same_exponent = sixteenths[0] == sixteenths[1]
    assert (~same_exponent).sum() <= max(1, 0.01 * same_exponent.size)
    nan = np.isnan(np.asarray(expected.codes, np.float32))
    if not INTERPRETING:  # whose cast makes another code of NaN
        np.testing.assert_array_equal(np.isnan(np.asarray(got.codes, np.float32)), nan)
    apart = np.where(nan, 0, np.abs(_places(expected.codes) - _places(got.codes)))
    per_code = np.repeat(np.atleast_1d(same_exponent), group_size, axis=-1)
    apart = apart[per_code[..., : apart.shape[-1]] if apart.ndim else per_code[0]]
    assert apart.max(initial=0) <= 1
    assert (apart > 0).sum() <= max(2, 0.01 * apart.size)


def _places(codes: jax.Array) -> np.ndarray:
    """The places of codes among all codes in ascending order."""
    array = np.asarray(codes)
    if array.dtype in (np.int8, np.uint8):
        return array.astype(int)
    ordinal = array.view(np.uint8).astype(int)
    return np.where(ordinal >= 128, 128 - ordinal, ordinal)
