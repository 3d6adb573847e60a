"""The kernels of a layer in Triton's interpreter, against their references.

Those of a whole layer in INT8 take over 10 seconds: the interpreter runs them in Python.
"""

import dataclasses

import interpreted
import jax
import jax.numpy as jnp
import pytest
from layer_laws import LayerLaws

import coat_jax as coat
from coat_jax import ops
from coat_jax.kernels import activation
from coat_jax.telemetry import report, sums_and_gradients

pytestmark = interpreted.MARKS


class TestKernels(LayerLaws):
    pass


def test_a_kernel_refuses_an_unknown_activation():
    """Rather than computing another one."""
    x, act = jnp.ones((1, 4, 32), jnp.bfloat16), activation.Limited("swish")
    with pytest.raises(Exception, match="no activation of this name"):
        activation.activation_forward((x, x), act, coat.E4M3, 16, exact=False)


def numbers(*shape, scale=1.0):
    return scale * jax.random.normal(jax.random.key(sum(shape)), shape)


PRECISIONS = {
    "fp8_linear": coat.FP8_LINEAR,
    "coat": coat.COAT,
    "rounded forward": coat.COAT_PAPER,
    "bf16 forward": coat.COAT_BF16_FORWARD,
    "stochastic backward": dataclasses.replace(coat.COAT, stochastic_backward=True),
}


def layers(precision, *implementations, limit=None):
    """Outputs and gradients of some MLPs and projections, one per implementation."""
    width, hidden = 64, 160
    scale = 1 + numbers(width, scale=0.1)
    weights = [numbers(width, hidden, scale=width**-0.5) for _ in range(2)]
    down = numbers(hidden, width, scale=hidden**-0.5)
    bias = numbers(hidden, scale=0.1)

    def layer(implementation, x, scale, weights, down, bias):
        how = {"precision": precision, "implementation": implementation}
        x = ops.gated_mlp(x, ops.Norm(scale), *weights, down, limit=limit, **how)
        x = ops.mlp(x, ops.Norm(scale, kind="layer"), weights[0], down, bias, **how)
        turned = {"head_dim": 32, "rotary": ops.Rotary()}
        return ops.norm_qkv(x, ops.Norm(scale), (*weights, weights[0]), **turned, **how)

    for implementation in implementations:
        outputs, pull = jax.vjp(
            lambda *args, i=implementation: layer(i, *args),
            numbers(2, 24, width), scale, weights, down, bias,
        )  # fmt: skip
        yield jax.tree.leaves((outputs, pull(tuple(numbers(*y.shape) for y in outputs))))


@pytest.mark.parametrize(("name", "limit"), [*((name, None) for name in PRECISIONS), ("coat", 1.0)])
def test_a_layer_of_kernels_is_the_layer_of_references(name, limit):
    """But for codes on an edge, where statistics differ in FP32's last place."""
    for a, b in zip(*layers(PRECISIONS[name], "xla", "triton", limit=limit), strict=True):
        assert jnp.linalg.norm(a - b) <= 1e-3 * jnp.linalg.norm(b)


def test_a_layer_of_kernels_is_as_accurate_as_references_in_int8():
    """Its kernels round an activation twice, first with a scale for 32 columns.

    The second rounding adds less than the first one's variance, and only to `down`'s input.
    """
    (exact,) = layers(coat.BF16, None)
    references, kernels = layers(coat.COAT_INT8, "xla", "triton")
    (fp8,) = layers(coat.COAT, "xla")
    outputs = 4
    for i, want in enumerate(exact):
        of_kernels, of_references, of_fp8 = (
            jnp.linalg.norm(each[i] - want) for each in (kernels, references, fp8)
        )
        assert of_kernels <= 1.2 * of_references
        assert i >= outputs or of_kernels <= 0.5 * of_fp8


def test_kernels_run_for_one_element_of_a_batch_after_the_other():
    x, w = numbers(3, 6, 64), numbers(64, 32)

    def loss(x, w):
        return jnp.sum(ops.linear(x, w, implementation="triton") ** 2)

    gradients = jax.grad(loss, argnums=(0, 1))
    found = jax.vmap(gradients, (0, None))(x, w)
    wanted = jax.tree.map(lambda *each: jnp.stack(each), *(gradients(one, w) for one in x))
    for a, b in zip(found, wanted, strict=True):
        assert jnp.linalg.norm(a - b) <= 1e-5 * jnp.linalg.norm(b)


@pytest.mark.parametrize(
    ("place", "exact"), [("channels", True), ("tokens", True), ("both", True), ("both", False)]
)
def test_gradients_with_outliers_are_those_of_references(place, exact):
    """Also in rows with small gradients: references find the largest one, kernels bound it.

    No code saturates, and where a code is subnormal for its larger scale, little is lost.
    """
    width, hidden, factor = 64, 160, 100.0
    precision = dataclasses.replace(coat.COAT, exact_forward=exact)
    rows = slice(None) if place == "channels" else slice(2)
    columns = slice(None) if place == "tokens" else slice(3, 5)
    dy = numbers(2, 24, width).at[0, rows, columns].mul(factor)
    x = numbers(2, 24, width, scale=2).at[0, rows, columns].mul(factor)
    gate, up = (numbers(width, hidden + i, scale=width**-0.5)[:, :hidden] for i in range(2))
    up, down = up.at[:, 7].mul(factor), numbers(hidden, width, scale=hidden**-0.5)

    def gradients(implementation):
        def mlp(*args):
            how = {"precision": precision, "implementation": implementation, "residual": False}
            return ops.gated_mlp(args[0], None, *args[1:], **how)

        return jax.vjp(mlp, x, gate, up, down)[1](dy)

    for a, b in zip(gradients("triton"), gradients("xla"), strict=True):
        off, length = (jnp.linalg.norm(each, axis=-1) for each in (a - b, b))
        assert jnp.all(off <= 2**-8 * length)


def test_gradients_of_equal_terms_do_not_saturate():
    """The gradient of the hidden values is then as large as its sum over columns allows.

    A scale from a bound that forgets how many columns are summed clips it to a fraction. Rounding
    changes each factor by at most 2^-3 (E5M2): the gradients keep their size to within a quarter.
    """
    columns = 256
    x, up = numbers(1, 8, columns), numbers(columns, 48, scale=1 / 16)
    down, dy = jnp.ones((48, columns)), jnp.ones((1, 8, columns))

    def gradient_of_up(**how):
        def mlp(up):
            return ops.mlp(x, None, up, down, activation="relu", residual=False, **how)

        return jax.vjp(mlp, up)[1](dy)[0]

    exact = gradient_of_up(precision=coat.BF16)
    rounded = gradient_of_up(precision=coat.COAT, implementation="triton")
    assert jnp.linalg.norm(rounded - exact) < 0.25 * jnp.linalg.norm(exact)


def test_telemetry_sees_the_tensors_of_kernels():
    """Those of the references, and the same of them but for the scales of gradients, which kernels
    may take from a bound: it is never below the largest.
    """
    width, hidden = 64, 160
    weights = [numbers(width, hidden, scale=width**-0.5) for _ in range(2)]
    down, x = numbers(hidden, width, scale=hidden**-0.5), numbers(2, 24, width)

    def seen(implementation):
        def loss(x):
            y = ops.gated_mlp(x, ops.Norm(), *weights, down, implementation=implementation)
            return jnp.sum(jnp.sin(y))

        return report(jax.device_get(sums_and_gradients(loss, x)[0]))

    references, kernels = seen("xla"), seen("triton")
    assert set(kernels) == set(references)
    for name, wanted in references.items():
        if name.endswith("gradient"):
            assert kernels[name].headroom > wanted.headroom - 0.1, name
        else:
            assert kernels[name].headroom == pytest.approx(wanted.headroom, abs=0.1), name
        assert kernels[name].saturated == 0
        assert kernels[name].error == pytest.approx(wanted.error, rel=0.05), name


def test_arrays_without_elements_launch_nothing():
    x, w = jnp.zeros((0, 24, 64)), numbers(64, 64)

    def layer(x, w):
        how = {"precision": coat.COAT, "implementation": "triton"}
        x, *heads = ops.norm_qkv(x, ops.Norm(), (w, w, w), head_dim=32, rotary=ops.Rotary(), **how)
        y = ops.gated_mlp(x, ops.Norm(), w, w, w, **how)
        return jnp.sum(y) + sum(map(jnp.sum, heads))

    dx, dw = jax.grad(layer, argnums=(0, 1))(x, w)
    assert dx.shape == x.shape
    assert not jnp.any(dw)
