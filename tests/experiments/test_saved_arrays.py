"""What layers save, rounded to few bits in a run in BF16; and products of some layers alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.numerics.minifloat import minifloat
from experiments.loss_study import operands
from experiments.loss_study.saved import Saved, rounded, saving

X = jax.random.normal(jax.random.key(0), (2, 8, 64))
NORM = ops.Norm(jnp.ones(64))
WEIGHTS = {
    name: jax.random.normal(jax.random.key(i), shape) / 8
    for i, (name, shape) in enumerate(
        {"query": (64, 64), "key": (64, 64), "value": (64, 64), "out": (64, 64)}.items()
        | {"gate": (64, 96), "up": (64, 96), "down": (96, 64)}.items()
    )
}


def layer(x, w):
    heads = {"head_dim": 32, "precision": "bf16"}
    x, *qkv = ops.norm_qkv(x, NORM, (w["query"], w["key"], w["value"]), **heads)
    x = x + ops.attention_linear(*qkv, w["out"], precision="bf16")
    return ops.gated_mlp(x, NORM, w["gate"], w["up"], w["down"], precision="bf16")


def trained(x=X):
    """The result of a layer, and its gradients."""
    y, pull = jax.jit(lambda x, w: jax.vjp(layer, x, w))(x, WEIGHTS)
    return y, *pull(jax.random.normal(jax.random.key(9), y.shape))


def apart(found, wanted):
    """The arrays whose values differ, weights by their names."""
    names = {"y": (found[0], wanted[0]), "x": (found[1], wanted[1])}
    names |= {name: (found[2][name], wanted[2][name]) for name in WEIGHTS}
    return {name for name, pair in names.items() if not np.array_equal(*pair)}


@pytest.mark.parametrize("scale", ["power of two", "E4M3"])
@pytest.mark.parametrize("form", ["E2M1", "E3M2", "E4M3"])
def test_values_are_those_of_codes_and_stochastic_ones_are_right_on_average(form, scale):
    saved = Saved((), form, 16, scale)
    x = jax.random.normal(jax.random.key(1), (64, 4, 16)) * 10.0 ** jnp.arange(-3, 1)[:, None]
    x = x.at[:, 2, 5].set(0)
    fmt = minifloat(form)
    for stochastic in (False, True):
        y = np.float64(rounded(x, saved, stochastic=stochastic))
        assert np.all(y[:, 2, 5] == 0)
        for block, original in zip(y.reshape(-1, 16), np.float64(x).reshape(-1, 16), strict=True):
            # Relative to the largest, as few values as the format has, at most two apart from x.
            assert len({*np.abs(block)}) <= len(fmt.magnitudes)
            largest = np.max(np.abs(original))
            assert np.max(np.abs(block - original)) <= 2.3 * largest * 2.0**-fmt.mantissa_bits / 2
    many = jnp.broadcast_to(x[:1], (4096, 4, 16))
    mean = np.mean(np.float64(rounded(many, saved, stochastic=True)), axis=0)
    largest = np.max(np.abs(x[0]), axis=-1, keepdims=True)
    assert np.all(np.abs(mean - x[0]) <= 5 * largest * 2.0**-fmt.mantissa_bits / 4096**0.5)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("norms", {"x", *WEIGHTS} - {"down"}),
        ("hidden", {"x", *WEIGHTS}),
        ("heads", {"x", "query", "key", "value"}),
        ("outputs", {"out"}),  # with cuDNN, the gradients of heads, too
    ],
)
def test_only_the_named_arrays_are_rounded_and_the_forward_pass_is_exact(name, wanted):
    exact = trained()
    with saving(Saved((name,))):
        found = trained()
    assert apart(found, exact) == wanted
    assert apart(trained(), exact) == set()


@pytest.mark.parametrize(
    ("product", "first"), [("qkv", "query"), ("out", "out"), ("up", "gate"), ("down", "down")]
)
def test_operands_of_some_products_are_rounded_and_of_no_others(product, first):
    """Rounded gradients change the gradient of the layer's own weight, and earlier ones'."""
    order = ["query", "out", "gate", "down"]
    exact = trained()
    with operands.rounding(["gradients"], [product]):
        changed = apart(trained(), exact)
    for name in order:
        assert (name in changed) == (order.index(name) <= order.index(first)), name
