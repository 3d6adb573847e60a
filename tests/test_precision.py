"""The presets are the rows of the table in `precision`, and a wrong setting is refused."""

import dataclasses

import jax.numpy as jnp
import pytest

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.minifloat import minifloat
from coat_jax.precision import PRESETS, Precision, precision_of

TABLE = {
    "bf16": (coat.BF16, False, None, None, True, True),
    "fp8_linear": (coat.FP8_LINEAR, True, None, None, True, True),
    "coat": (coat.COAT, True, 16, None, True, True),
    "coat_lean": (coat.COAT_LEAN, True, 16, 16, True, True),
    "coat_int8": (coat.COAT_INT8, True, 16, None, True, True, False, "int8"),
    "coat_bf16_forward": (coat.COAT_BF16_FORWARD, True, 16, None, True, True, False, "bf16"),
    "coat_paper": (coat.COAT_PAPER, True, 16, None, False, False),
}


def test_presets_are_the_rows_of_the_table_by_any_spelling_of_their_names():
    assert PRESETS.keys() == TABLE.keys()
    for name, (preset, fp8_linear, *kept) in TABLE.items():
        assert preset == Precision(fp8_linear, E4M3, E5M2, *kept) == PRESETS[name]
        for spelling in (name, name.upper(), name.title()):
            assert precision_of(spelling) is preset
    own = Precision(block=128)
    assert precision_of(own) is own


def test_a_precision_is_a_static_argument():
    """It hashes by value, and cannot be changed."""
    assert Precision() == coat.COAT
    assert hash(Precision(block=32)) == hash(dataclasses.replace(coat.COAT, block=32))
    with pytest.raises(dataclasses.FrozenInstanceError):
        coat.COAT.block = None


def test_the_formats_may_be_equal_or_exchanged_but_not_both_e5m2():
    assert Precision(backward=E4M3).backward == E4M3
    assert Precision(forward=E5M2, backward=E4M3).forward == E5M2
    with pytest.raises(ValueError, match=r"cannot both be E5M2.*Use E4M3 for one of them"):
        Precision(forward=E5M2)


FORMATS = [jnp.bfloat16, jnp.float8_e4m3b11fnuz, "fp8", "INT4", None, 8]
BLOCKS = [0, 8, -16, 17, 256, True, False, "16", 1.5]
OF_FORMATS = (
    r"is not an FP8 format of coat_jax. Use .*E4M3.*E5M2.*'E3M4', with up to 8 exponent and 15"
)
OF_FORMATS += r" mantissa bits \(symmetric integers .* E0M\(b-1\)"
REFUSED = {
    "forward": (FORMATS, OF_FORMATS),
    "backward": (FORMATS, OF_FORMATS),
    "block": (BLOCKS, "must be .* among 16, 32, 64, 128"),
    "attention_block": (BLOCKS, "must be .* among 16, 32, 64, 128"),
    "exact_forward": ([1, None, "true"], "must be True or False"),
    "forward_products": (["FP8", "fp16", None, True], "must be 'fp8' or 'int8' or 'bf16'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_values_are_refused(name):
    values, message = REFUSED[name]
    for value in values:
        with pytest.raises(ValueError, match=message):
            Precision(**{name: value})


@pytest.mark.parametrize("products", ["int8", "bf16"])
@pytest.mark.parametrize("name", ["fp8_linear", "exact_forward"])
def test_other_forward_products_need_other_fields(name, products):
    with pytest.raises(UserError, match=f"forward_products='{products}' needs {name}=True"):
        Precision(forward_products=products, **{name: False})


@pytest.mark.parametrize("name", ["fp8", "", "coat-lean", None, 8, E4M3])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(
        ValueError, match=r"no precision .*Use one of bf16, .*coat_paper, or a coat\.P"
    ):
        precision_of(name)


def test_a_format_is_a_dtype_a_minifloat_or_a_name():
    assert Precision(forward="e4m3", backward="E5M2") == coat.COAT
    assert Precision(forward=minifloat("E4M3")) == coat.COAT
    simulated = Precision(forward="E3M4")
    assert simulated.forward == minifloat("E3M4")
    assert simulated.simulated
    assert not coat.COAT.simulated
    assert not dataclasses.replace(simulated, fp8_linear=False, block=None).simulated


def test_a_simulated_format_is_signed_has_a_zero_and_is_not_too_small():
    for name in ("UE4M4", "UE8M0", "E4M3:no_subnormals:no_zero"):
        with pytest.raises(UserError, match="cannot hold activations and gradients"):
            Precision(forward=name)
    with pytest.raises(UserError, match=r"'E2M1:bias=90' has 9\.69e-27 as its .* lower"):
        Precision(forward="E2M1:bias=90")
