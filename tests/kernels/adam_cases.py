"""The AdamW kernel against its reference: one table for the interpreter and for the GPU.

How far they may differ: the kernel's arithmetic is that of FP32 with approximate functions
(2^-22 relative each, after logarithms of up to 40 times that: hence 1e-5 for what is stored
in FP32). Where the exact value of a code lies within that of the middle between two codes, the
kernel may choose the other one; stochastic rounding compares with a probability that the
kernel computes to 0.2 %. So codes may differ by one, in few places. Where 16 k lies on the edge of
a whole number, a group may get the neighbouring exponent, and with it other codes.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from coat_jax.kernels.adam import Hyper, Leaf, LeafResult, Settings, largest_direction
from coat_jax.kernels.adam_launch import BUCKET, adam_step
from coat_jax.kernels.dispatch import interpreting
from coat_jax.numerics import corrections, noise
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.storage import DIRECTION, LOGARITHM, Storage

ALL_FP8 = Storage(min_size=0)  # every leaf in 8 bits
EXPANDED = Storage(min_size=0, first=E4M3, second=E4M3)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    shapes: tuple[tuple[int, ...], ...] = ((4, 128),)
    param: str | None = "float32"
    grad: str = "float32"
    hyper: Hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0, 0.1, 1.0)
    settings: Settings = Settings(ALL_FP8)
    count: int = 7
    decayed: bool = True
    direction: str | None = None  # its dtype; by default that of the gradients
    corrected: bool = False  # BF16 parameters have corrections
    hostile: bool = False  # zeros, NaN, infinities, the tiny and the huge among the gradients


CASES = [
    Case("one block", ((8, 128),)),
    Case("several blocks", ((40, 256),)),
    Case("E4M3", ((40, 256),), settings=Settings(EXPANDED)),
    Case(
        "E4M3 and logarithms",
        ((40, 256),),
        settings=Settings(dataclasses.replace(EXPANDED, second=LOGARITHM)),
    ),
    Case(
        "directions and E4M3",
        ((40, 256),),
        settings=Settings(dataclasses.replace(EXPANDED, first=DIRECTION)),
    ),
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
    Case("b1 = 0", hyper=Hyper(1e-3, 0.0, 0.95, 1e-8, 0.0, 0.1, 1.0)),
    Case(
        "E4M3, slow first moment",
        hyper=Hyper(1e-3, 0.95, 0.95, 1e-8, 0.0, 0.1, 1.0),
        settings=Settings(EXPANDED),
    ),
    Case("slow first moment", hyper=Hyper(1e-3, 0.95, 0.95, 1e-8, 0.0, 0.1, 1.0)),
    Case("slow decays", hyper=Hyper(1e-3, 0.99, 0.9999, 1e-8, 0.0, 0.1, 1.0), count=500),
    Case("eps = 0", ((16, 128),), hyper=Hyper(1e-3, 0.9, 0.95, 0.0, 0.0, 0.1, 1.0), hostile=True),
    Case(
        "E5M2, fast first moment",
        hyper=Hyper(1e-3, 0.8, 0.95, 1e-8, 0.0, 0.1, 1.0),
        settings=Settings(Storage(min_size=0, first=E5M2, second=E5M2)),
    ),
    Case(
        "gradients scaled down",
        ((16, 128),),
        hyper=Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.1, 1e-19),
        hostile=True,
    ),
    Case(
        "gradients scaled to nothing",
        ((16, 128),),
        hyper=Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.1, 1e-25),
        hostile=True,
    ),
    Case(
        "gradients scaled by zero",
        ((16, 128),),
        hyper=Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.1, 0.0),
        hostile=True,
    ),
    Case(
        "gradients scaled far up",
        ((16, 128),),
        hyper=Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.1, 1e10),
        hostile=True,
    ),
    Case("no memory of squares, no step", hyper=Hyper(0.0, 0.9, 0.0, 1e-8, 0.0, 0.1, 1.0)),
    Case("eps_root", hyper=Hyper(1e-3, 0.9, 0.95, 1e-8, 1e-6, 0.1, 1.0)),
    Case("gradients scaled", hyper=Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.1, 0.125)),
    Case("skipped", hyper=Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.1, 1.0, np.bool_(True))),
    Case("not skipped", hyper=Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.1, 1.0, np.bool_(False))),
    Case("nesterov", settings=Settings(ALL_FP8, nesterov=True)),
    Case("nearest", settings=Settings(Storage(min_size=0, stochastic=False))),
    Case("E4M3, nearest", settings=Settings(dataclasses.replace(EXPANDED, stochastic=False))),
    Case("seeded", settings=Settings(Storage(min_size=0, seed=2**31 + 5))),
    Case("E5M2", settings=Settings(Storage(min_size=0, first=E5M2, second=E5M2))),
    Case("groups of 16", ((4, 256),), settings=Settings(Storage(min_size=0, group_size=16))),
    Case("groups of 1024", ((3, 1024),), settings=Settings(Storage(min_size=0, group_size=1024))),
    Case("direction only", param=None, grad="bfloat16"),
    Case("direction in FP32", param=None, grad="bfloat16", direction="float32"),
    Case("direction, nesterov", param=None, settings=Settings(ALL_FP8, nesterov=True)),
    Case(
        "rounded parameters",
        param="bfloat16",
        grad="bfloat16",
        settings=Settings(ALL_FP8, round_params=True),
    ),
    Case("hostile gradients", ((16, 128),), hostile=True),
    Case("E4M3, hostile gradients", ((16, 128),), settings=Settings(EXPANDED), hostile=True),
    Case("hostile, uneven", ((16, 100),), hostile=True),
    Case(
        "hostile, rounded parameters",
        ((16, 128),),
        param="bfloat16",
        settings=Settings(ALL_FP8, round_params=True),
        hostile=True,
    ),
    Case("corrected", ((40, 256),), param="bfloat16", grad="bfloat16", corrected=True),
    Case(
        "corrected and rounded stochastically",
        ((40, 256),),
        param="bfloat16",
        settings=Settings(ALL_FP8, round_params=True),
        corrected=True,
    ),
    Case(
        "corrected, skipped",
        param="bfloat16",
        hyper=Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.1, 1.0, np.bool_(True)),
        corrected=True,
    ),
    Case(
        "corrected bucket and rest",
        ((4, 128), (2, 256), (128,), (1, 128), (3, 100), (8, 128), (7, 128), (16, 128), (5, 300)),
        param="bfloat16",
        corrected=True,
    ),
    Case("corrected, hostile", ((16, 128),), param="bfloat16", corrected=True, hostile=True),
    Case("bucket", ((4, 128), (2, 256), (128,), (1, 128), (3, 384), (8, 128), (7, 128), (16, 128))),
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
            grad, mu, nu = (_with_hostile_rows(x) for x in (grad, mu, nu))
        param = None if case.param is None else normal(shape, 1.0)
        correction = None
        if case.corrected:
            param, correction = corrections.split(param)
        leaves.append(
            Leaf(
                None if param is None else param.astype(case.param),
                grad.astype(case.grad),
                *written(storage, mu, nu),
                correction,
            )
        )
    return leaves


def _with_hostile_rows(x: jax.Array) -> jax.Array:
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

    def step(leaf: Leaf) -> tuple[jax.Array, Leaf]:
        (stepped,) = adam_step(
            [leaf], jnp.int32(count), hyper, settings, implementation=implementation
        )
        later = {"mu": stepped.mu, "nu": stepped.nu, "correction": stepped.correction}
        return stepped.result, leaf._replace(**later)

    return (jax.jit(step) if implementation == "xla" else step)(leaf)


def fresh_leaf(param: jax.Array | None, grad: jax.Array, storage: Storage = ALL_FP8) -> Leaf:
    """A leaf before its first step."""
    zeros = jnp.zeros(grad.shape)
    return Leaf(param, grad, *written(storage, zeros, zeros))


@partial(jax.jit, static_argnums=0)
def written(storage: Storage, m: jax.Array, v: jax.Array) -> tuple[Expanded, Expanded]:
    """Both moments as `storage` holds them, rounded to nearest."""
    nearest = dataclasses.replace(storage, stochastic=False)
    return nearest.write_moments(m, v, noise.leaf_key(0, 0, 0), 0.9, 0.999)


def check_rounded_parameters(implementation: str) -> None:
    """BF16 parameters are rounded up as often as they should be, by numbers of their own.

    The first step's direction is the gradient's sign: 1 + 0.3 units in the last place here.
    """
    shape, share = (32, 1024), 0.3
    rng = np.random.default_rng(0)
    grad = -jnp.asarray(np.exp(rng.normal(size=shape)), jnp.bfloat16)
    settings = Settings(ALL_FP8, round_params=True)
    hyper = Hyper(learning_rate=share * 2.0**-7, weight_decay=0.0)
    for sign in (1, -1):
        leaf = fresh_leaf(sign * jnp.ones(shape, jnp.bfloat16), sign * grad)
        result = np.asarray(one_step(implementation, leaf, 1, hyper, settings)[0], np.float32)
        assert set(np.unique(sign * result)) == {1.0, 1.0 + 2.0**-7}
        up = sign * result > 1
        assert abs(up.mean() - share) < 6 * np.sqrt(share * (1 - share) / up.size)
        own = noise.round_to_bfloat16(
            jnp.full(shape, 1 + share * 2.0**-7),
            noise.param_key(noise.leaf_key(0, 1, 0)),
            run=ALL_FP8.group_size,
        )
        assert np.mean((np.asarray(own, np.float32) > 1) == up) > 0.999
        of_moments = noise.uniform(noise.leaf_key(0, 1, 0), shape, run=ALL_FP8.group_size)
        assert abs(np.corrcoef(up.ravel(), np.ravel(of_moments))[0, 1]) < 6 / np.sqrt(up.size)


def check_rounded_corrections(implementation: str) -> None:
    """The last of 24 bits is rounded likewise: 1 + 0.3 units in that place here."""
    shape, share = (32, 1024), 0.3
    leaf = fresh_leaf(jnp.ones(shape, jnp.bfloat16), -jnp.ones(shape))
    leaf = leaf._replace(correction=jnp.zeros(shape, jnp.int8))
    hyper = Hyper(learning_rate=share * 2.0**-15, weight_decay=0.0)
    settings = Settings(ALL_FP8, round_params=True)
    result, leaf = one_step(implementation, leaf, 1, hyper, settings)
    np.testing.assert_array_equal(np.asarray(result, np.float32), 1.0)
    assert set(np.unique(leaf.correction)) == {0, 1}
    up = np.asarray(leaf.correction) == 1
    key, run = noise.leaf_key(0, 1, 0), ALL_FP8.group_size
    own = np.asarray(noise.bits(noise.param_key(key), shape, run=run) >> 8)
    assert np.mean((own + round(256 * share) >= 256) == up) > 0.999
    of_moments = noise.uniform(key, shape, run=run)
    assert abs(np.corrcoef(up.ravel(), np.ravel(of_moments))[0, 1]) < 6 / np.sqrt(up.size)


def check_non_finite_gradients(implementation: str) -> None:
    """NaN and infinity make their own parameter NaN for good, and no other.

    NaN stays in both moments in FP8. A logarithm becomes zero, and a direction a small number.
    """
    rng = np.random.default_rng(0)
    grad = np.float32(rng.normal(size=(8, 128)))
    grad[1, 3], grad[2, 5], grad[3, 0] = np.nan, np.inf, -np.inf
    for storage in (ALL_FP8, EXPANDED):
        _check_non_finite_gradients(implementation, grad, storage)


def _check_non_finite_gradients(implementation: str, grad: np.ndarray, storage: Storage) -> None:
    leaf = fresh_leaf(jnp.ones((8, 128)), jnp.asarray(grad), storage)
    hyper, settings = Hyper(learning_rate=1e-3), Settings(storage)
    result, leaf = one_step(implementation, leaf, 1, hyper, settings)
    np.testing.assert_array_equal(np.isnan(result), ~np.isfinite(grad))
    leaf = leaf._replace(param=result, grad=jnp.ones((8, 128)))
    result, leaf = one_step(implementation, leaf, 2, hyper, settings)
    np.testing.assert_array_equal(np.isnan(result), ~np.isfinite(grad))
    for moment in (leaf.mu, leaf.nu):
        assert np.all(np.isfinite(moment.amax))
    if storage is ALL_FP8:
        assert np.all(np.isfinite(Storage(min_size=0).read(leaf.mu)))
        return
    if implementation == "triton" and interpreting():  # whose cast makes another code of NaN
        return
    for moment in (leaf.mu, leaf.nu):
        np.testing.assert_array_equal(np.isnan(moment.codes.astype(jnp.float32)), np.isnan(grad))


def check_an_element_comes_to_rest(implementation: str) -> None:
    """Its gradient is zero from step 10 on, while its group's other gradients are not."""
    rng = np.random.default_rng(0)
    hyper, settings = Hyper(b1=0.7, b2=0.7), Settings(ALL_FP8)
    leaf = fresh_leaf(None, jnp.zeros((8, 128)))
    late = np.zeros((8, 128))
    step = jax.jit(lambda leaf, t: one_step(implementation, leaf, t, hyper, settings))
    for t in range(1, 101):
        grad = np.abs(rng.normal(size=(8, 128))) + 0.1
        if t > 10:
            grad[:, 5] = 0
        direction, leaf = step(leaf._replace(grad=jnp.asarray(grad, jnp.float32)), t)
        if t > 80:
            late += np.asarray(direction)
    np.testing.assert_allclose(late[:, 5], 0, atol=1e-3)
    assert np.all(late[:, 6:] > 5)


def check_a_lost_second_moment(implementation: str) -> None:
    """Where v is zero, the smallest that its group can store takes its place, and decays as v does.

    The gradient is zero, and the first moment is the root of that smallest v.
    """
    lost = np.broadcast_to(np.arange(128) == 5, (8, 128))
    smallest = ALL_FP8.resolution_of_second()
    m = jnp.where(lost, np.sqrt(smallest), 0.0)
    leaf = Leaf(None, jnp.zeros((8, 128)), *written(ALL_FP8, m, jnp.where(lost, 0.0, 1.0)))
    hyper = Hyper(b1=0.7, b2=0.7, eps=0.0)
    direction, _ = one_step(implementation, leaf, 1000, hyper, Settings(ALL_FP8))
    np.testing.assert_allclose(direction[:, 5], 0.7 / np.sqrt(0.7), rtol=1e-4)


def check_enormous_gradients(implementation: str) -> None:
    """Their squares overflow; no direction exceeds the bound, and nothing becomes infinite."""
    rng = np.random.default_rng(0)
    leaf = fresh_leaf(None, jnp.zeros((8, 128)))
    hyper, settings = Hyper(), Settings(ALL_FP8)
    for t in range(1, 5):
        grad = np.float32(rng.normal(size=(8, 128)))
        grad[:, 7] = (3e38, -1e30, 1e25, 1e19, 1e12, 0, 1e-20, -1e-38)
        leaf = leaf._replace(grad=jnp.asarray(np.roll(grad, t, 0)))
        direction, leaf = one_step(implementation, leaf, t, hyper, settings)
        bound = largest_direction(jnp.int32(t), hyper.b1, hyper.b2, nesterov=False)
        assert np.max(np.abs(direction)) <= float(bound) * (1 + 1e-6)
        for part in (*leaf.mu, *leaf.nu):
            assert np.all(np.isfinite(np.asarray(part, np.float32)))


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
    sixteenths = [np.asarray(e.k16, int) for e in (expected, got)]
    assert np.abs(sixteenths[0] - sixteenths[1]).max(initial=0) <= 1
    same_exponent = sixteenths[0] == sixteenths[1]
    assert (~same_exponent).sum() <= max(1, 0.01 * same_exponent.size)
    nan = np.isnan(np.asarray(expected.codes, np.float32))
    if not interpreting():  # whose cast makes another code of NaN
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
