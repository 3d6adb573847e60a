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
    "coat_int8": (coat.COAT_INT8, True, 16, None, True, True, False, True),
    "coat_paper": (coat.COAT_PAPER, True, 16, None, False, False),
}


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_is_its_row_of_the_table(name):
    preset, fp8_linear, *kept = TABLE[name]
    assert preset == Precision(fp8_linear, E4M3, E5M2, *kept)
    assert PRESETS[name] == preset


def test_there_are_no_other_presets():
    assert PRESETS.keys() == TABLE.keys()


def test_coat_is_the_default():
    assert Precision() == coat.COAT


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_is_found_by_its_name_in_any_case(name):
    for spelling in (name, name.upper(), name.title()):
        assert precision_of(spelling) is PRESETS[name]


def test_a_precision_passes_through():
    own = Precision(block=128)
    assert precision_of(own) is own


def test_an_ablation_replaces_one_field():
    for size in (16, 32, 64, 128):
        ablation = dataclasses.replace(coat.COAT, block=size)
        assert ablation.block == size
        assert dataclasses.replace(ablation, block=16) == coat.COAT


def test_a_precision_is_a_static_argument():
    """It hashes by value, and cannot be changed."""
    assert hash(Precision(block=32)) == hash(Precision(block=32))
    assert len({Precision(), coat.COAT, coat.BF16}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        coat.COAT.block = None


def test_the_formats_may_be_equal_or_exchanged_but_not_both_e5m2():
    assert Precision(backward=E4M3).backward == E4M3
    assert Precision(forward=E5M2, backward=E4M3).forward == E5M2
    with pytest.raises(ValueError, match=r"cannot both be E5M2.*Use E4M3 for one of them"):
        Precision(forward=E5M2)


@pytest.mark.parametrize("name", ["forward", "backward"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e4m3b11fnuz, "fp8", "INT4", None, 8])
def test_other_formats_are_refused(name, dtype):
    refusal = r"is not an FP8 format of coat_jax. Use .*E4M3.*E5M2.*'E3M4'"
    refusal += r", with up to 8 exponent and 10 mantissa bits \(symmetric integers .* E0M\(b-1\)"
    with pytest.raises(ValueError, match=refusal):
        Precision(**{name: dtype})


@pytest.mark.parametrize("name", ["block", "attention_block"])
@pytest.mark.parametrize("size", [0, 8, -16, 17, 256, True, False, "16", 1.5])
def test_other_blocks_are_refused(name, size):
    with pytest.raises(UserError, match=f"{name}={size!r} must be .* among 16, 32, 64, 128"):
        Precision(**{name: size})


@pytest.mark.parametrize("value", [1, None, "true"])
def test_the_forward_pass_is_exact_or_not(value):
    with pytest.raises(UserError, match=f"exact_forward={value!r} must be True or False"):
        Precision(exact_forward=value)


@pytest.mark.parametrize("name", ["fp8_linear", "exact_forward"])
def test_forward_products_in_int8_need_other_fields(name):
    with pytest.raises(UserError, match=f"int8_forward=True needs {name}=True"):
        Precision(int8_forward=True, **{name: False})


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


@pytest.mark.parametrize("name", ["UE4M4", "UE8M0", "E4M3:no_subnormals:no_zero"])
def test_a_simulated_format_is_signed_and_has_a_zero(name):
    with pytest.raises(UserError, match="cannot hold activations and gradients"):
        Precision(forward=name)


def test_a_simulated_format_must_not_be_too_small():
    with pytest.raises(UserError, match=r"'E2M1:bias=90' has 9\.69e-27 as its .* lower"):
        Precision(forward="E2M1:bias=90")
