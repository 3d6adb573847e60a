"""A router against its equations, and what its penalties and its gradients are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import assert_close, draw, same_gradients, through

import coat_jax as coat
from coat_jax import ops
from coat_jax.numerics.formats import E4M3

ROWS, TOKENS, EXPERTS, CHOSEN = 2, 24, 6, 2
LOGITS = draw(0, (ROWS, TOKENS, EXPERTS))


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_token_has_the_experts_with_the_largest_scores(scores, normalized):
    experts, weights = ops.route(LOGITS, CHOSEN, scores=scores, normalized=normalized)
    logits = np.asarray(LOGITS, np.float64)
    of_all = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    if scores == "sigmoid":
        of_all = 1 / (1 + np.exp(-logits))
    np.testing.assert_array_equal(experts, np.argsort(-logits, axis=-1)[..., :CHOSEN])
    wanted = np.take_along_axis(of_all, np.asarray(experts), -1)
    wanted /= wanted.sum(-1, keepdims=True) if normalized else 1
    np.testing.assert_allclose(weights, wanted, rtol=1e-6)
    gradient = jax.grad(lambda x: ops.route(x, CHOSEN, scores=scores, normalized=True)[1][0, 0, 0])
    assert np.isfinite(gradient(jnp.full_like(LOGITS, -200.0))).all()  # whose sigmoids are 0


def test_a_bias_changes_the_choice_but_not_the_weights():
    bias = jnp.zeros(EXPERTS).at[4].set(2.0)  # above any score
    settings = {"scores": "sigmoid", "normalized": False}
    experts, weights = ops.route(LOGITS, CHOSEN, **settings, bias=bias)
    assert (experts[..., 0] == 4).all()
    wanted = jnp.take_along_axis(jax.nn.sigmoid(LOGITS), experts, -1)
    np.testing.assert_array_equal(weights, wanted)
    assert not jax.grad(lambda b: ops.route(LOGITS, 1, **settings, bias=b)[1].sum())(bias).any()


def test_the_load_counts_tokens_and_leaves_padding_out():
    experts, _ = ops.route(LOGITS, CHOSEN, normalized=True)
    counted = jnp.arange(TOKENS) < jnp.array([[TOKENS], [10]])
    load = ops.expert_load(experts, EXPERTS, counted)
    np.testing.assert_array_equal(load.sum(-1), [CHOSEN * TOKENS, CHOSEN * 10])
    wanted = [np.bincount(np.ravel(experts[0]), minlength=EXPERTS)]
    wanted += [np.bincount(np.ravel(experts[1, :10]), minlength=EXPERTS)]
    np.testing.assert_array_equal(load, wanted)
    segments = 7 * counted  # numbers of texts in a row, 0 for padding
    np.testing.assert_array_equal(ops.expert_load(experts, EXPERTS, segments), wanted)
    with pytest.raises(ValueError, match=r"counted \(24, 2\) must be \(2, 24\), as the tokens"):
        ops.expert_load(experts, EXPERTS, segments.T)
    for penalty in (
        lambda x, e, c: ops.balance_loss(x, e, counted=c),
        lambda x, e, c: ops.router_z_loss(x, c),
    ):
        padded = penalty(LOGITS, experts, counted)
        np.testing.assert_allclose(padded[0], penalty(LOGITS[0], experts[0], None), rtol=1e-6)
        alone = penalty(LOGITS[1, :10], experts[1, :10], None)
        np.testing.assert_allclose(padded[1], alone, rtol=1e-6)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_balance_is_least_where_loads_are_even(scores):
    """There it is the number of experts of a token; where all tokens agree, that of all experts."""
    even = jnp.tile(8 * jnp.eye(EXPERTS), (4, 1))
    one = jnp.zeros((TOKENS, EXPERTS)).at[:, 0].set(40)
    for logits, wanted, tolerance in ((even, 1, 1e-5), (one, EXPERTS, 1e-6)):
        experts, _ = ops.route(logits, 1, normalized=True)
        found = ops.balance_loss(logits, experts)
        np.testing.assert_allclose(found, wanted, rtol=tolerance)
    experts, _ = ops.route(one, 1, scores=scores, normalized=True)
    gradient = jax.grad(lambda x: ops.balance_loss(x, experts, scores=scores))(one * 0.01)
    assert (gradient[:, 0] > 0).all()
    assert (gradient[:, 1:] < 0).all()


def test_logits_are_a_product_in_fp32_whose_input_is_saved_in_fp8():
    x, router = draw(1, (ROWS, TOKENS, 32)), draw(2, (32, EXPERTS))
    product = lambda x, w: jnp.matmul(x, w, precision="highest")  # noqa: E731
    same_gradients(lambda *a: ops.router_logits(*a, precision="bf16"), product, x, router)
    in_bf16 = x.astype(jnp.bfloat16)
    logits, pull = jax.vjp(ops.router_logits, in_bf16, router)
    assert logits.dtype == jnp.float32
    assert_close(logits, product(in_bf16.astype(jnp.float32), router))
    saved = [leaf for leaf in jax.tree.leaves(pull) if leaf.size == x.size]
    assert {leaf.dtype.name for leaf in saved} == {"float8_e4m3fn"}
    nearest = coat.Precision(stochastic=False)
    dx, d_router = jax.vjp(lambda *a: ops.router_logits(*a, precision=nearest), x, router)[1](
        logits
    )
    assert_close(d_router, jnp.tensordot(through(x, E4M3, 16), logits, ((0, 1), (0, 1))))
    assert_close(dx, product(logits, router.T))
    assert pull(logits)[0].dtype == jnp.bfloat16
