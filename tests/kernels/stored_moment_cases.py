"""The kernels for moments of any optimizer against their references: for interpreter and GPU.

How far they may differ is what `adam_cases` says of the AdamW kernel, whose arithmetic they share.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from adam_cases import compare_moments, with_hostile_rows

from coat_jax.kernels import stored_moment
from coat_jax.numerics import noise
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.formats import E5M2, format_of
from coat_jax.optax import compress
from coat_jax.storage import Storage

ALL_FP8 = Storage(min_size=0)
EPS = {"float32": 1e-5, "bfloat16": 2.0**-7, "float16": 2.0**-10}  # a unit in the last place


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, ...] = (40, 256)
    dtype: str = "float32"
    storage: Storage = ALL_FP8
    positive: bool = False  # nowhere negative, as a second moment
    hostile: bool = False  # zeros, NaN, infinities, the tiny and the huge
    new_dtype: str | None = None  # of the new values, where it is another one


def stored(
    name: str, shape: tuple[int, ...] = (40, 256), *, positive: bool = False, **how: Any
) -> Case:
    """A case whose moment is stored in another way."""
    return Case(name, shape, storage=Storage(min_size=0, **how), positive=positive)


def hostile(name: str, columns: int = 128, dtype: str = "float32", **fields: Any) -> Case:
    return Case(name, (16, columns), dtype, hostile=True, **fields)


CASES = [
    Case("several blocks"),
    Case("rank 3", (2, 3, 256)),
    Case("scalar", ()),
    Case("short row", (3,)),
    Case("one column", (300, 1)),
    Case("uneven rows", (5, 300)),
    Case("uneven blocks", (3, 128)),
    Case("uneven rows that fill blocks", (16, 64)),
    Case("bfloat16", dtype="bfloat16"),
    Case("bfloat16, uneven", (7, 100), dtype="bfloat16"),
    Case("float16", dtype="float16"),
    Case("bfloat16 that became float32", dtype="bfloat16", new_dtype="float32"),
    Case("positive, uneven", (9, 200), positive=True),
    stored("nearest", stochastic=False),
    stored("positive, nearest", positive=True, stochastic=False),
    stored("seeded", seed=2**31 + 5),
    stored("E5M2", other=E5M2),
    stored("E5M2, positive", positive=True, other=E5M2),
    stored("groups of 16, uneven", (6, 100), group_size=16),
    stored("groups of 1024", (3, 2048), group_size=1024),
    hostile("hostile"),
    hostile("hostile, positive", positive=True),
    hostile("hostile, uneven", 100),
    hostile("hostile, bfloat16", dtype="bfloat16"),
    hostile("hostile, float16", dtype="float16"),
    hostile("hostile, nearest", storage=Storage(min_size=0, stochastic=False)),
]


def moment_of(case: Case, seed: int) -> jax.Array:
    """Random values of a moment."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=case.shape) * np.exp(2 * rng.normal(size=case.shape)) * 1e-2
    x = jnp.asarray(np.square(x) if case.positive else x, jnp.float32)
    if case.hostile:
        x = with_hostile_rows(x).at[8, 4].set(-0.0).at[9, ::2].set(1e-39).at[10].set(1e-39)
        if not case.positive:
            x = x.at[11, 3].set(-jnp.inf)
    return x.astype(case.dtype)


def stored_of(case: Case, seed: int = 0) -> Expanded:
    """A moment as `compress` stores it."""
    values = moment_of(dataclasses.replace(case, hostile=False), seed)
    e = case.storage.write(values, case.storage.other)
    return e._replace(amax=stored_moment.saturating(e.amax, values.dtype))


def poorly_stored_of(case: Case) -> Expanded:
    """A moment whose groups have a smaller k than they would be given."""
    stored = stored_of(case)
    codes = stored.codes.astype(jnp.float32)
    codes = jnp.copysign(jnp.maximum(jnp.abs(codes), 16), codes)
    return stored._replace(
        codes=codes.astype(stored.codes.dtype), exponent_x16=jnp.full_like(stored.exponent_x16, 9)
    )


def new_of(case: Case, stored: Expanded) -> jax.Array:
    """The values after a step that leaves the first rows as they were."""
    new = moment_of(case, 1)
    if len(case.shape) > 1 and not case.hostile:
        new = new.at[:2].set(stored_moment.read(stored, case.storage, "triton")[:2])
    return new.astype(case.new_dtype or case.dtype)


def check(case: Case) -> None:
    """Reads and rewrites through XLA and through Triton, and compares everything."""
    stored = stored_of(case)
    wanted = stored_moment.read_reference(stored, case.storage)
    got = stored_moment.read(stored, case.storage, "triton")
    assert got.dtype == wanted.dtype == jnp.dtype(case.dtype)
    got, wanted = np.float64(got), np.float64(wanted)
    subnormal = 2.0**-24 if case.dtype == "float16" else 0.0
    np.testing.assert_allclose(got, wanted, rtol=EPS[case.dtype], atol=subnormal)
    largest = np.abs(np.float32(stored.codes)) == format_of(stored.codes.dtype).max
    np.testing.assert_array_equal(got[largest], wanted[largest])

    new = new_of(case, stored)
    key = noise.leaf_key(case.storage.seed, 3, 5)
    got = stored_moment.rewrite(stored, new, case.storage, key, "triton")
    wanted = jax.jit(stored_moment.rewrite_reference, static_argnums=2)(
        stored, new, case.storage, key
    )
    assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in wanted]
    if len(case.shape) > 1 and not case.hostile:
        for a, b in zip(got, stored, strict=True):  # these rows keep what is stored
            np.testing.assert_array_equal(np.float32(a[:2]), np.float32(b[:2]))
        got, wanted = (Expanded(*(a[2:] for a in e)) for e in (got, wanted))
    np.testing.assert_array_equal(got.amax, wanted.amax)
    compare_moments(wanted, got, case.storage.group_size)
    if case.positive:
        known = np.float32(new[2:] if len(case.shape) > 1 and not case.hostile else new)
        nonzero = known >= 2.0**-126
        assert np.all(np.float32(got.codes)[nonzero] > 0)


class ReferenceLaws:
    """What a moment that is read and rewritten must keep, whatever computes it."""

    implementation = "triton"

    def read(self, stored: Expanded) -> jax.Array:
        return stored_moment.read(stored, ALL_FP8, self.implementation)

    def rewrite(self, stored: Expanded, new: jax.Array, step: int = 0) -> Expanded:
        key = noise.leaf_key(0, step, 0)
        return stored_moment.rewrite(stored, new, ALL_FP8, key, self.implementation)

    @pytest.mark.costly
    @pytest.mark.parametrize("dtype", EPS)
    @pytest.mark.parametrize("columns", [384, 300], ids=["whole groups", "a short last group"])
    def test_a_group_keeps_its_codes_until_a_value_changes(self, columns: int, dtype: str) -> None:
        """Bit for bit, though the group would be given another k for the same values.

        One element that changes rewrites its own group and no other.
        """
        stored = poorly_stored_of(Case("", (6, columns), dtype))
        values = self.read(stored)
        for a, b in zip(self.rewrite(stored, values), stored, strict=True):
            np.testing.assert_array_equal(np.float32(a), np.float32(b))
        after = self.rewrite(stored, values.at[2, 130].mul(2).at[4, 299].mul(2))
        rewritten = np.nonzero(np.asarray(after.exponent_x16) != 9)
        assert list(zip(*rewritten, strict=True)) == [(2, 1), (4, 2)]

    def test_the_decoded_value_is_right_on_average(self) -> None:
        """Over many keys, for numbers of either sign."""
        case = Case("", (4, 128))
        x, stored, runs = moment_of(case, 1), stored_of(case), 64
        sums = np.zeros(case.shape)
        for step in range(runs):
            e = self.rewrite(stored, x, step)
            sums += np.float64(self.read(e))
        error = sums / runs - np.float64(x)
        amax = np.float64(e.amax)
        # A code is at most 2^-3 of its number or the smallest one; its standard deviation is half.
        smallest = amax * (2.0**-9 / 448) ** (16 / np.float64(e.exponent_x16))
        deviation = np.maximum(np.abs(np.float64(x)) / 16, smallest) / np.sqrt(runs)
        assert np.all(np.abs(error) < 6 * deviation)
        assert abs(np.mean(error / deviation)) < 6 / np.sqrt(error.size)

    def test_a_moment_does_not_drift_while_it_is_read_and_written(self) -> None:
        """The largest of each group stays exactly as it is."""
        stored = stored_of(Case("", (8, 256)))
        for step in range(10):
            values = self.read(stored).at[:, ::2].multiply(0.99)
            magnitudes = np.abs(values).reshape(8, 2, 128)
            stored = self.rewrite(stored, values, step)
            largest = magnitudes.max(axis=-1)
            np.testing.assert_array_equal(stored.amax, largest)
            read = np.abs(self.read(stored)).reshape(8, 2, 128)
            at_largest = magnitudes == largest[..., None]
            np.testing.assert_array_equal(read[at_largest], magnitudes[at_largest])


class StoredMomentLaws(ReferenceLaws):
    """Those, and what the kernels do like XLA."""

    def test_under_vmap_the_references_run(self) -> None:
        """The kernels have no rule for it."""
        case = Case("", (4, 128))
        stored = jax.tree.map(lambda *a: jnp.stack(a), stored_of(case, 0), stored_of(case, 1))
        keys = jnp.stack([noise.leaf_key(0, 1, i) for i in (0, 1)])
        new = jnp.stack([moment_of(case, seed) for seed in (2, 3)])

        def both(implementation: str) -> tuple:
            @jax.jit
            def run(stored: Expanded, new: jax.Array, keys: jax.Array) -> tuple:
                def one(stored: Expanded, new: jax.Array, key: jax.Array) -> tuple:
                    return (
                        stored_moment.read(stored, ALL_FP8, implementation),
                        stored_moment.rewrite(stored, new, ALL_FP8, key, implementation),
                    )

                return jax.vmap(one)(stored, new, keys)

            return run(stored, new, keys)

        for got, wanted in zip(
            jax.tree.leaves(both("triton")), jax.tree.leaves(both("xla")), strict=True
        ):
            np.testing.assert_array_equal(np.float32(got), np.float32(wanted))

    def test_a_derivative_can_be_taken_through_one_step(self) -> None:
        """And is that of the step without kernels; through two steps it is refused."""
        params = {"w": moment_of(Case("", (4, 256)), 1)}

        def derivative(implementation: str, steps: int) -> jax.Array:
            tx = compress(
                optax.sgd(0.1, momentum=0.9), storage=ALL_FP8, implementation=implementation
            )

            def loss(grads: jax.Array) -> jax.Array:
                stepped, state = params, tx.init(params)
                for _ in range(steps):
                    updates, state = tx.update({"w": grads}, state, stepped)
                    stepped = optax.apply_updates(stepped, updates)
                return jnp.sum(jnp.square(stepped["w"]))

            return jax.jit(jax.grad(loss))(moment_of(Case("", (4, 256)), 2))

        np.testing.assert_allclose(derivative("triton", 1), derivative("xla", 1), rtol=1e-6)
        with pytest.raises(NotImplementedError, match=r"8 bits cannot be differentiated"):
            derivative("triton", 2)
