"""What the op keeps of cuDNN's attention, with an attention that keeps the same played by NumPy.

The real one needs a GPU: `test_attention_gpu.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import assert_close, distance, draw, same_gradients

import coat_jax as coat
from coat_jax import ops
from coat_jax.numerics.cache_formats import encode_heads

B, S, N, K, H = 2, 6, 4, 2, 8


class Played:
    """Softmax attention that keeps q, k, v, an empty array, the log-sum-exp and o, as cuDNN's."""

    def __init__(self):
        self.forward_passes = 0
        self.attend = jax.custom_vjp(lambda q, k, v: self.forward(q, k, v)[0])
        self.attend.defvjp(self.forward, self.backward)

    def forward(self, q, k, v):
        shapes = jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, N, S), "float32")
        o, log_sums = jax.pure_callback(self.compute, shapes, q, k, v)
        return o, (q, k, v, jnp.zeros(0, q.dtype), log_sums, o)

    def compute(self, q, k, v):
        self.forward_passes += 1
        scores = self.scores(q, k)
        log_sums = np.log(np.sum(np.exp(scores), axis=-1))
        weights = np.exp(scores - log_sums[..., None])
        return np.einsum("bnst,btnh->bsnh", weights, np.repeat(v, N // K, 2)), log_sums

    def backward(self, kept, do):
        q, k, v, _, log_sums, o = kept
        weights = jnp.exp(self.scores(q, k, jnp) - log_sums[..., None])
        d_weights = jnp.einsum("bsnh,btnh->bnst", do, jnp.repeat(v, N // K, 2))
        delta = jnp.einsum("bsnh,bsnh->bns", do, o)[..., None]
        d_scores = weights * (d_weights - delta) * H**-0.5
        dq = jnp.einsum("bnst,btnh->bsnh", d_scores, jnp.repeat(k, N // K, 2))
        dk = jnp.einsum("bnst,bsnh->btnh", d_scores, q)
        dv = jnp.einsum("bnst,bsnh->btnh", weights, do)
        return dq, *(d.reshape(B, S, K, N // K, H).sum(3) for d in (dk, dv))

    def scores(self, q, k, np=np):
        scores = np.einsum("bsnh,btnh->bnst", q, np.repeat(k, N // K, 2)) * H**-0.5
        return np.where(np.tril(np.ones((S, S), bool)), scores, -np.inf)


@pytest.fixture
def cudnn(monkeypatch):
    played, real = Played(), jax.nn.dot_product_attention

    def attention(q, k, v, implementation, **settings):
        if implementation == "cudnn":
            return played.attend(q, k, v)
        return real(q, k, v, implementation=implementation, **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    return played


def gradients(backend, precision):
    """Of attention with its output projection, with respect to all it takes."""
    *qkv, weight, dy = draw(0, (B, S, N, H), (B, S, K, H), (B, S, K, H), (N * H, 10), (B, S, 10))

    def loss(*args):
        y = ops.attention_linear(*args, precision=precision, backend=backend)
        return jnp.sum(y * dy)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*qkv, weight)


def test_the_forward_pass_runs_once(cudnn):
    for count, precision in enumerate((coat.BF16, coat.COAT, coat.COAT_LEAN), 1):
        jax.block_until_ready(gradients("cudnn", precision))
        assert cudnn.forward_passes == count


def test_gradients_are_the_same_and_an_output_in_blocks_moves_them_by_its_rounding(cudnn):
    """o enters a row's gradient as a sum over the head: E4M3's 2^-4 a value, less on average."""
    assert_close(gradients("cudnn", coat.BF16), gradients("xla", coat.BF16), 1e-5)
    rounded = dataclasses.replace(coat.COAT_LEAN, exact_forward=False)
    got, want = (gradients(backend, rounded) for backend in ("cudnn", "xla"))
    off = distance(got, want)
    assert np.all(off < 2**-4)
    assert np.all(off[:2] > 0)  # it is the rounded o that is put back


def test_the_output_is_rounded_as_the_precision_says():
    qkv = [draw(i, (4, 16, heads, 16)) for i, heads in enumerate((4, 2, 2))]
    tokens = 4 * 16
    weight, dy = jnp.zeros((64, tokens)), jnp.eye(tokens).reshape(4, 16, tokens)

    def saved(stochastic):
        """The error of the output that the gradient of the projection is computed from."""
        how = {"block": None, "attention_block": 16, "stochastic": stochastic}
        precision = coat.Precision(fp8_linear=False, **how)
        op = functools.partial(ops.attention_linear, *qkv, precision=precision)
        (d_weight,) = jax.vjp(op, weight)[1](dy)
        o = ops.attention(*qkv, precision=precision)
        return np.asarray(d_weight.T - o.reshape(tokens, -1))

    nearest, stochastic = saved(False), saved(True)
    assert 0.1 < np.mean(nearest != stochastic) < 0.5
    assert np.all(np.abs(nearest) <= np.abs(stochastic) * (1 + 1e-6))


LENGTHS = [(5, 5), (5, 6), (5, 9), (4, 6), (4, 5), (6, 5), (9, 5)]  # the last two see no other


@pytest.mark.costly
@pytest.mark.parametrize(("s", "t"), LENGTHS)
def test_an_added_token_changes_nothing(s, t, monkeypatch):
    """cuDNN takes odd lengths with one query or key more: results and gradients are the same."""
    real = jax.nn.dot_product_attention
    xla = lambda *qkv, implementation, **how: real(*qkv, implementation="xla", **how)  # noqa: E731
    monkeypatch.setattr(jax.nn, "dot_product_attention", xla)
    ways = [{}, {"causal": False}]
    ways += [{"window": 3}] if s <= t else []  # else some see no key at all
    ways += [{"segments": jnp.arange(B * s).reshape(B, s) // 2}] if s == t else []
    shapes = (B, s, N, H), (B, t, K, H), (B, t, K, H)

    def of(backend):
        def f(every):
            pairs = zip(ways, every, strict=True)
            return [
                ops.attention(*qkv, backend=backend, precision="bf16", **way) for way, qkv in pairs
            ]

        return f

    same_gradients(of("cudnn"), of("xla"), [draw(i, *shapes) for i in range(len(ways))])


def test_fp16_on_a_cpu_is_that_of_fp32_rounded():
    q, k, v = (x.astype("float16") for x in draw(7, (2, 5, N, H), (2, 5, K, H), (2, 5, K, H)))
    got = ops.attention(q, k, v, precision="bf16")
    wanted = ops.attention(*(x.astype("float32") for x in (q, k, v)), precision="bf16")
    assert got.dtype == jnp.float16
    np.testing.assert_array_equal(got, wanted.astype("float16"))
    stored = ops.Past(*(encode_heads(jnp.swapaxes(x, 1, 2), None) for x in (k, v)))
    past, new = (jax.tree.map(of, stored) for of in (lambda x: x[None], lambda x: x[:, :, :1]))
    one = ops.attention_to_past(q[:, :1], new, ops.Visible(past, 0, jnp.zeros(2, jnp.int32), 5))
    assert one.dtype == jnp.float16
