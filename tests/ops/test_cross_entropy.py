"""Laws of the loss: the direct formula over all logits at once, however the sequence is cut."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ops_cases import (
    assert_close,
    assert_equal,
    draw,
    pulled,
    same_gradients,
    weight,
)

from coat_jax import ops

B, S, D, V = 2, 7, 12, 19
W = weight(2, D, V)


def labels_for(shape, ignored=0.3, seed=0):
    """Any negative label is ignored, not only -100."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, V, shape)
    return np.where(rng.random(shape) < ignored, rng.choice([-100, -1], shape), labels)


def direct(hidden, w, labels, *, z_loss=0.0, label_smoothing=0.0, chunk=None):
    """Each token's loss against a soft label, from the logarithm of softmax."""
    del chunk
    log_p = jax.nn.log_softmax(hidden @ w, axis=-1)
    wanted = (1 - label_smoothing) * jax.nn.one_hot(labels, V) + label_smoothing / V
    lse = jax.nn.logsumexp(hidden @ w, axis=-1)
    losses = -(wanted * log_p).sum(-1) + z_loss * lse**2
    return jnp.where(labels >= 0, losses, 0).sum() / (labels >= 0).sum()


CASES = {
    "one chunk": ((B, S), {}),  # of 512
    "chunks that fit": ((2, 3, 8), {"chunk": 4, "z_loss": 1e-2}),
    "a short last chunk": ((B, S), {"chunk": 3, "label_smoothing": 0.1}),
    "all at once": ((B, S), {"chunk": 5, "z_loss": 0.1, "label_smoothing": 0.3}),
    "no batch": ((S,), {"chunk": 2}),
    "token by token": ((B, S), {"chunk": 1}),
}


def test_it_is_the_direct_formula():
    """Each case on arrays of its own, in one program."""
    labels = {name: labels_for(shape, seed=i) for i, (name, (shape, _)) in enumerate(CASES.items())}

    def of(loss):
        def f(arrays):
            return {
                name: loss(*arrays[name], labels[name], **settings)
                for name, (_, settings) in CASES.items()
            }

        return f

    arrays = {name: (draw(i, (*shape, D)), W) for i, (name, (shape, _)) in enumerate(CASES.items())}
    same_gradients(of(ops.cross_entropy), of(direct), arrays)


@pytest.mark.parametrize("rows", [4, 6])
def test_loss_and_gradients_do_not_depend_on_the_mesh(rows):
    """Of 4 x 2 devices, which split rows and vocabulary; 6 rows are no multiple of 4."""
    hidden, w, labels = draw(3, (rows, 8, D)), weight(4, D, 20), labels_for((rows, 8))

    def loss(hidden, w):
        return ops.cross_entropy(hidden, w, labels, chunk=4, z_loss=1e-2)

    alone = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, w)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    by_rows = P("fsdp") if rows == 4 else P()
    with jax.set_mesh(mesh):
        sharded = jax.device_put(hidden, by_rows), jax.device_put(w, P("fsdp", "tensor"))
        together = jax.jit(jax.value_and_grad(loss, (0, 1)))(*sharded)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), together, alone)


def test_it_runs_in_a_shard_map():
    """There its arrays are shards, and communication is the caller's."""
    hidden, labels = draw(5, (4, 8, D)), labels_for((4, 8), ignored=0.0)
    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,), devices=jax.devices()[:4])

    specs = (P("x"), P(), P("x"))

    @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    def loss(hidden, w, labels):
        return jax.lax.pmean(ops.cross_entropy(hidden, w, labels, chunk=4), "x")

    whole = jax.jit(jax.value_and_grad(ops.cross_entropy))(hidden, W, labels)
    parts = jax.jit(jax.value_and_grad(loss))(hidden, W, labels)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-6), parts, whole)


def test_the_gradient_of_a_weight_in_bf16_is_summed_in_fp32():
    """Of 512 equal terms. Summed in BF16, it would stop growing at the 256th."""
    hidden, weight = jnp.ones((1, 512, D), jnp.bfloat16), jnp.zeros((D, V), jnp.bfloat16)
    labels = jnp.zeros((1, 512), jnp.int32)
    dw = jax.grad(lambda w: ops.cross_entropy(hidden, w, labels, chunk=1))(weight)
    wanted = 1 / V - np.eye(1, V)
    np.testing.assert_allclose(dw, np.broadcast_to(wanted, dw.shape), rtol=2.0**-7)


def test_without_labels_the_loss_and_its_gradients_are_zero():
    none, settings = jnp.full((B, S), -100), {"chunk": 3, "z_loss": 0.1, "label_smoothing": 0.1}
    f = partial(ops.cross_entropy, labels=none, **settings)
    found = pulled(f, draw(1, (B, S, D)), W)[:2]
    assert_equal(found, jax.tree.map(np.zeros_like, found))


def test_large_logits_stay_finite():
    f = partial(ops.cross_entropy, labels=labels_for((B, S)))
    loss, gradients, _ = pulled(f, 1e5 * draw(1, (B, S, D)), W)
    assert loss > 1e4
    assert all(np.all(np.isfinite(g)) for g in gradients)


def sizes(jaxpr):
    """The size of every array in a program, also inside its loops."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {out.aval.size for out in equation.outvars}
        for inner in jaxprs_in_params(equation.params):
            found |= sizes(inner)
    return found


def test_no_more_logits_exist_than_those_of_a_chunk():
    """Vocabulary and batch are primes, so that no other array has a multiple of V numbers."""
    batch, tokens, width, vocabulary, chunk = 3, 40, 4, 101, 5
    hidden, w = jnp.ones((batch, tokens, width)), jnp.ones((width, vocabulary))
    labels = jnp.zeros((batch, tokens), int)

    loss = partial(ops.cross_entropy, labels=labels, chunk=chunk)
    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, w).jaxpr
    of_vocabulary = {size for size in sizes(program) if size % vocabulary == 0}
    assert batch * chunk * vocabulary in of_vocabulary
    assert max(of_vocabulary) <= max(batch * chunk, width) * vocabulary


def test_the_embedding_can_be_the_head_in_bf16():
    """Its gradient is a product in another layout, one that XLA's CPU backend refused to run."""
    embed, hidden = draw(1, (256, 128), over=11.0), draw(2, (2, 64, 128), dtype=jnp.bfloat16)
    labels = jnp.arange(128).reshape(2, 64)

    def loss(embed, hidden):
        return ops.cross_entropy(hidden, embed.T, labels)

    both = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    got, want = both(embed, hidden), both(embed, hidden.astype(jnp.float32))
    assert [leaf.dtype.name for leaf in jax.tree.leaves(got)] == ["float32", "float32", "bfloat16"]
    assert_close(got, want, 2.0**-6)


def test_labels_may_have_any_integer_dtype():
    """Also one that holds neither -100, with which a short chunk is filled up, nor V."""
    vocabulary = 300
    hidden, w, labels = draw(0, (2, 7, D)), weight(2, D, vocabulary), np.arange(14).reshape(2, 7)

    @jax.jit
    def losses(hidden, w):
        return [
            jax.value_and_grad(ops.cross_entropy, argnums=(0, 1))(
                hidden, w, jnp.asarray(labels, dtype), chunk=3
            )
            for dtype in (jnp.int32, jnp.int8, jnp.uint8, jnp.uint16, jnp.uint32)
        ]

    wanted, *others = losses(hidden, w)
    for found in others:
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    too_large = jnp.full((2, 7), 2**32 - 100, jnp.uint32)
    assert jnp.isnan(ops.cross_entropy(hidden, w, too_large))


def test_a_label_beyond_the_vocabulary_is_never_a_finite_loss():
    """JAX would make label 1 of 2^32 + 1."""
    hidden, labels = draw(1, (B, S, D)), np.zeros((B, S), np.int64)
    for label, finite in ((-100, True), (V - 1, True), (V, False), (2**32 + 1, False)):
        labels[1, 2] = label
        loss = jax.jit(partial(ops.cross_entropy, labels=labels))(hidden, W)
        assert np.isfinite(loss) == finite
