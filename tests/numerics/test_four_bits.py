"""INT4 codes: what they stand for, and that FP8 has the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.numerics import four_bits
from coat_jax.numerics.four_bits import GROUP


def weight_of(kind="normal", channels=32, inputs=4 * GROUP):
    random = np.random.default_rng(0)
    w = {
        "normal": lambda: random.standard_normal((channels, inputs)),
        "heavy tails": lambda: random.standard_t(5, (channels, inputs)),
        "uneven": lambda: (
            random.standard_normal((channels, inputs))
            * np.exp2(random.integers(-12, 12, (channels, inputs // GROUP))).repeat(GROUP, axis=1)
        ),
    }[kind]()
    return jnp.asarray(w, jnp.float32)


def rounded(w):
    scale = four_bits.group_scales(w)
    return four_bits.encode(w, scale), scale


def test_all_codes_survive_packing():
    u = jax.random.randint(jax.random.key(0), (3, 2 * GROUP), 0, 16)
    packed = four_bits.pack(u)
    assert packed.nbytes * 2 == u.size
    assert (four_bits.unpack(packed) == u).all()
    # The halves of a group share bytes.
    assert (packed[:, 0] & 15 == u[:, 0]).all()
    assert (packed[:, 0] >> 4 == u[:, GROUP // 2]).all()


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "uneven"])
def test_fp8_has_the_same_numbers(kind):
    codes, scale = rounded(weight_of(kind))
    assert scale.dtype == jnp.bfloat16
    assert four_bits.are_of_channel(scale)
    expanded, of_channel = four_bits.expand(codes, scale)
    assert expanded.dtype == jnp.float8_e4m3fn
    values = expanded.astype(jnp.float32) * of_channel[:, None]
    assert (values == four_bits.values(codes, scale)).all()


@pytest.mark.parametrize(("kind", "least"), [("normal", 19.2), ("heavy tails", 15.6)])
def test_the_error_is_less_than_with_the_largest_element_on_seven(kind, least):
    """Groups that have scales of their own, in FP32, for the comparison."""

    def sqnr(values):
        return 10 * np.log10(float(jnp.sum(w**2) / jnp.sum((values - w) ** 2)))

    w = weight_of(kind)
    found = sqnr(four_bits.values(*rounded(w)))
    groups = w.reshape(len(w), -1, GROUP)
    scale = jnp.max(jnp.abs(groups), axis=-1, keepdims=True) / 7
    assert found > least
    assert found > sqnr((jnp.round(groups / scale) * scale).reshape(w.shape)) + 0.4


def test_multiplying_a_weight_by_a_power_of_two_changes_only_scales():
    w = weight_of()
    codes, scale = rounded(w)
    again, larger = rounded(2.0**-40 * w)
    assert (again == codes).all()
    assert (larger == scale * 2.0**-40).all()


def test_zeros_stay_zero_and_a_nan_is_seen():
    w = weight_of().at[0].set(0).at[1, :GROUP].set(0).at[2, 5].set(jnp.nan)
    codes, scale = rounded(w)
    values = four_bits.values(codes, scale)
    assert (values[0] == 0).all()
    assert (values[1, :GROUP] == 0).all()
    assert jnp.isnan(scale[2]).all()
    assert jnp.isfinite(jnp.delete(scale, 2, axis=0)).all()


def test_scales_of_others_are_recognized():
    scale = jnp.array([[1.0, 0.5, 2.0**-9]])
    assert four_bits.are_of_channel(scale)
    assert not four_bits.are_of_channel(scale * jnp.array([1, 1, 0.5]))  # E4M3 ends there
    assert not four_bits.are_of_channel(scale.at[0, 1].set(0.75))
    assert not four_bits.are_of_channel(scale * (1 + 2.0**-9))  # which BF16 does not hold


def test_codes_may_have_zeros_of_their_own():
    codes, scale = rounded(weight_of())
    eights = jnp.full(scale.shape, 8, jnp.uint8)
    same = four_bits.values(codes, scale)
    assert (four_bits.values(codes, scale, eights) == same).all()
    moved = four_bits.values(codes, scale, eights - 3)
    assert (moved == same + 3 * jnp.repeat(scale.astype(jnp.float32), GROUP, axis=1)).all()
