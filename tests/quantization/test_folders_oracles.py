"""transformers, with compressed-tensors, loads the folders and computes the same logits."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from quantization_cases import TOKENS, quantized
from small_model import SMALL, filled

from coat_jax import quantization as q
from coat_jax.numerics import four_bits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.oracle

CONFIG = dataclasses.replace(SMALL, dtype=jnp.float32, scan=False, qkv_bias=True, ffn=130)


def logits_of(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.tensor(TOKENS[0])).logits.numpy()


def ours(small):
    return np.asarray(small(jnp.asarray(TOKENS[0])))


def distance(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def both(folder, small):
    """Our logits, theirs, and those of the model that is not quantized."""
    q.save(folder, small)
    return ours(small), logits_of(folder), ours(filled(CONFIG))


@pytest.mark.parametrize("format", ["int8", "fp8", "mixed"])
def test_with_weights_in_8_bits_only_sums_differ(format, tmp_path):
    """Some 100 products in each, a dozen deep, in FP32: 1e-4 is generous."""
    model = filled(CONFIG)
    up = model.layers[1].mlp.up
    up[...] = up[...].at[5].set(8.0)  # which mixed stores in FP8
    recipe = q.Recipe(format=format, activations="none", leave=("layers.0.mlp.*",))
    found, theirs, _ = both(tmp_path, q.quantize(model, recipe))
    np.testing.assert_allclose(found, theirs, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize(
    ("format", "activations"), [("int8", "static"), ("fp8", "static"), ("fp8", "dynamic")]
)
def test_with_rounded_activations_few_codes_differ(format, activations, tmp_path):
    """Where sums in another order put a number on the other side of a tie. Of FP32's 2^24 numbers
    in a binade, few are as near to one of the 2^4 or 2^7 ties as sums differ, some 2^-20: so few
    codes that the distance is far below that of rounding itself."""
    found, theirs, exact = both(
        tmp_path, quantized(filled(CONFIG), format=format, activations=activations)
    )
    assert distance(found, theirs) < 0.2 * distance(theirs, exact)


def test_dynamic_int8_is_as_near_as_theirs(tmp_path):
    """compressed-tensors puts the largest number of a token on 127.5, where vLLM and we put it on
    127: all codes may differ, and their errors are alike."""
    found, theirs, exact = both(
        tmp_path, quantized(filled(CONFIG), format="int8", activations="dynamic")
    )
    of_ours, of_theirs = distance(found, exact), distance(theirs, exact)
    assert 0.8 * of_theirs < of_ours < 1.25 * of_theirs


FOUR = dataclasses.replace(CONFIG, width=128, heads=8, ffn=256, qkv_bias=False)


@pytest.mark.parametrize("activations", ["none", "dynamic", "static"])
def test_int4_weights_are_theirs_bit_for_bit(activations, tmp_path):
    """Their layers say what they would multiply by; with rounded activations few codes differ."""
    small = quantized(filled(FOUR), format="int4", activations=activations)
    q.save(tmp_path, small)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = torch.tensor(TOKENS[0])
    with torch.no_grad():
        theirs = model(tokens).logits.numpy()
    layer = model.model.layers[1].mlp.up_proj
    weight = small.layers[1].mlp.up.weight()
    expected = four_bits.values(weight.codes, weight.scale)
    found = layer.weight.detach().to(torch.float32).numpy()
    assert (found == np.asarray(expected)).all()
    bound = 0.2 * distance(theirs, ours(filled(FOUR))) if activations != "none" else 1e-5
    assert distance(ours(small), theirs) < bound
