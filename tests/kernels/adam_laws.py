"""Laws of the AdamW step that hold for every implementation: its test modules inherit them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adam_cases import ALL_FP8, EXPANDED, INTERPRETING, fresh_leaf, one_step, written

from coat_jax.kernels.adam import Hyper, Leaf, Settings
from coat_jax.kernels.launch import launch
from coat_jax.numerics import corrections, integers, noise
from coat_jax.storage import Storage

SIZE = 1024  # of a block of the kernels for corrections


class StepLaws:
    """The laws of one step."""

    implementation = "triton"

    def one_step(self, *arguments) -> tuple[jax.Array, Leaf]:
        return one_step(self.implementation, *arguments)

    def test_parameters_are_rounded_right_on_average_by_their_own_key(self) -> None:
        """The first step goes against the gradient: 1 + 0.3 units in the last place here."""
        shape, share = (32, 1024), 0.3
        rng = np.random.default_rng(0)
        grad = -jnp.asarray(np.exp(rng.normal(size=shape)), jnp.bfloat16)
        settings = Settings(ALL_FP8, round_params=True)
        hyper = Hyper(learning_rate=share * 2.0**-7, weight_decay=0.0)
        for sign in (1, -1):
            leaf = fresh_leaf(sign * jnp.ones(shape, jnp.bfloat16), sign * grad)
            result = np.asarray(self.one_step(leaf, 1, hyper, settings)[0], np.float32)
            assert set(np.unique(sign * result)) == {1.0, 1.0 + 2.0**-7}
            up = sign * result > 1
            assert abs(up.mean() - share) < 6 * np.sqrt(share * (1 - share) / up.size)
            own = noise.round_to_bfloat16(
                jnp.full(shape, 1 + share * 2.0**-7),
                noise.param_key(noise.leaf_key(0, 1, 0)),
                run=ALL_FP8.group_size,
            )
            assert np.mean((np.asarray(own, np.float32) > 1) == up) > 0.999
            _assert_independent_of_moments(up)

    def test_corrections_are_rounded_right_on_average_by_their_own_key(self) -> None:
        """The last of 24 bits is rounded likewise: 1 + 0.3 units in that place here."""
        shape, share = (32, 1024), 0.3
        leaf = fresh_leaf(jnp.ones(shape, jnp.bfloat16), -jnp.ones(shape))
        leaf = leaf._replace(correction=jnp.zeros(shape, jnp.int8))
        hyper = Hyper(learning_rate=share * 2.0**-15, weight_decay=0.0)
        settings = Settings(ALL_FP8, round_params=True)
        result, leaf = self.one_step(leaf, 1, hyper, settings)
        np.testing.assert_array_equal(np.asarray(result, np.float32), 1.0)
        assert set(np.unique(leaf.correction)) == {0, 1}
        up = np.asarray(leaf.correction) == 1
        key, run = noise.leaf_key(0, 1, 0), ALL_FP8.group_size
        own = np.asarray(noise.bits(noise.param_key(key), shape, run=run) >> 8)
        assert np.mean((own + round(256 * share) >= 256) == up) > 0.999
        _assert_independent_of_moments(up)

    def test_an_element_without_gradient_comes_to_rest(self) -> None:
        """Its gradient is zero from step 10 on, while its group's other gradients are not."""
        rng = np.random.default_rng(0)
        hyper, settings = Hyper(b1=0.7, b2=0.7), Settings(ALL_FP8)
        leaf = fresh_leaf(None, jnp.zeros((8, 128)))
        late = np.zeros((8, 128))
        step = jax.jit(lambda leaf, t: self.one_step(leaf, t, hyper, settings))
        for t in range(1, 101):
            grad = np.abs(rng.normal(size=(8, 128))) + 0.1
            if t > 10:
                grad[:, 5] = 0
            direction, leaf = step(leaf._replace(grad=np.float32(grad)), t)
            if t > 80:
                late += np.asarray(direction)
        np.testing.assert_allclose(late[:, 5], 0, atol=1e-3)
        assert np.all(late[:, 6:] > 5)

    def test_a_second_moment_that_is_lost_is_replaced_by_the_smallest_one(self) -> None:
        """Where v is zero, the smallest that its group can store takes its place, and decays.

        The gradient is zero, and the first moment is the root of that smallest v.
        """
        lost = np.broadcast_to(np.arange(128) == 5, (8, 128))
        smallest = ALL_FP8.resolution_of_second()
        m = jnp.where(lost, np.sqrt(smallest), 0.0)
        leaf = Leaf(None, jnp.zeros((8, 128)), *written(ALL_FP8, m, jnp.where(lost, 0.0, 1.0)))
        hyper = Hyper(b1=0.7, b2=0.7, eps=0.0)
        direction, _ = self.one_step(leaf, 1000, hyper, Settings(ALL_FP8))
        np.testing.assert_allclose(direction[:, 5], 0.7 / np.sqrt(0.7), rtol=1e-4)

    @pytest.mark.parametrize("storage", [ALL_FP8, EXPANDED], ids=["logarithms", "FP8"])
    def test_a_gradient_that_is_not_finite_makes_its_own_parameter_nan(
        self, storage: Storage
    ) -> None:
        """For good, and no other. NaN stays in both moments in FP8.

        A logarithm becomes zero, and a direction a small number.
        """
        grad = np.float32(np.random.default_rng(0).normal(size=(8, 128)))
        grad[1, 3], grad[2, 5], grad[3, 0] = np.nan, np.inf, -np.inf
        leaf = fresh_leaf(jnp.ones((8, 128)), jnp.asarray(grad), storage)
        hyper, settings = Hyper(learning_rate=1e-3), Settings(storage)
        for step, later in ((1, leaf.grad), (2, jnp.ones((8, 128)))):
            result, leaf = self.one_step(leaf._replace(grad=later), step, hyper, settings)
            np.testing.assert_array_equal(np.isnan(result), ~np.isfinite(grad))
            leaf = leaf._replace(param=result)
        for moment in (leaf.mu, leaf.nu):
            assert np.all(np.isfinite(moment.amax))
        if storage is ALL_FP8:
            assert np.all(np.isfinite(Storage(min_size=0).read(leaf.mu)))
        elif self.implementation == "xla" or not INTERPRETING:  # whose NaN has another code
            for moment in (leaf.mu, leaf.nu):
                np.testing.assert_array_equal(np.isnan(np.float32(moment.codes)), np.isnan(grad))

    def test_directions_whose_scale_would_have_no_reciprocal_become_zero(self) -> None:
        """A moment without gradients gets there, if it was small."""
        zeros = jnp.zeros((8, 128))
        mu, nu = written(ALL_FP8, zeros + 1.02 * integers.SMALLEST, zeros + 1.0)
        assert np.all(mu.amax > 0)
        leaf, hyper = Leaf(zeros, zeros, mu, nu), Hyper(1e-3, 0.9, 0.95, 1e-8, 0.0, 0.1, 1.0)
        _, after = self.one_step(leaf, 7, hyper, Settings(ALL_FP8))
        assert np.all(np.asarray(after.nu.amax) > 0)
        assert not np.any(after.mu.amax)
        assert not np.any(after.mu.codes)


class KernelLaws(StepLaws):
    """Those, and the laws of the kernels for corrections."""

    def test_params_are_joined_with_corrections_bit_for_bit(self) -> None:
        """Every BF16 number (no NaN) with every correction."""
        from correction_kernels import join_block

        bits = np.arange(2**16, dtype=np.uint16)
        bits = bits[(bits & 0x7FFF) <= 0x7F80]
        every = np.arange(-128, 128, dtype=np.int8)
        if INTERPRETING:  # which is slow: some of them, and all with small magnitudes
            bits = np.concatenate([bits[:64], bits[2**15 : 2**15 + 64], bits[::997]])
        value, correction = np.broadcast_arrays(bits.view(jnp.bfloat16)[:, None], every[None])
        value, correction = (_whole_blocks(a.ravel()) for a in (value, correction))
        (got,) = launch(
            join_block,
            value,
            correction,
            outputs=[jax.ShapeDtypeStruct(value.shape, jnp.float32)],
            programs=value.size // SIZE,
            warps=2,
            SIZE=SIZE,
        )
        _assert_same_bits(got, corrections.join(value, correction))

    def test_params_are_split_into_bf16_and_corrections_bit_for_bit(self) -> None:
        """Numbers of all kinds."""
        from correction_kernels import split_block

        rng = np.random.default_rng(0)
        random = rng.integers(0, 2**32, 2**13, dtype=np.uint32)
        powers = np.arange(1, 255, dtype=np.uint32) << 23
        near = (powers[:, None] + np.arange(-300, 300, 7).astype(np.uint32)).ravel()
        special = [0, 1, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
        special = np.array(special, np.uint32)
        bits = np.concatenate([special, special | 0x80000000, random, near, near | 0x80000000])
        x = _whole_blocks(bits.view(np.float32))
        noise = jnp.asarray(rng.integers(0, 2**16, x.shape, dtype=np.uint32))
        got = launch(
            split_block,
            x,
            noise,
            outputs=[jax.ShapeDtypeStruct(x.shape, d) for d in (jnp.bfloat16, jnp.int8)],
            programs=x.size // SIZE,
            warps=2,
            SIZE=SIZE,
        )
        for a, b in zip(got, corrections.split(x, noise >> 8), strict=True):
            _assert_same_bits(a, b)


def _assert_independent_of_moments(up: np.ndarray) -> None:
    of_moments = noise.uniform(noise.leaf_key(0, 1, 0), up.shape, run=ALL_FP8.group_size)
    assert abs(np.corrcoef(up.ravel(), np.ravel(of_moments))[0, 1]) < 6 / np.sqrt(up.size)


def _whole_blocks(array: np.ndarray) -> jax.Array:
    return jnp.asarray(np.resize(array, -(-array.size // SIZE) * SIZE))


def _assert_same_bits(a: jax.Array, b: jax.Array) -> None:
    assert a.dtype == b.dtype
    integers = np.dtype(f"u{a.dtype.itemsize}")
    np.testing.assert_array_equal(np.asarray(a).view(integers), np.asarray(b).view(integers))
