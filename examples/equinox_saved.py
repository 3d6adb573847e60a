"""An Equinox transformer whose residual stream is offloaded to host memory, in FP8.

    python -m examples.equinox_saved

Layers are stacked and run in a loop, as in Levanter. The checkpoint saves each layer's input and
the hidden array of its MLP; both wait in host memory for the backward pass. Three lines change: the
import, what names the arrays, and the policy.
"""

from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import coat_jax as coat
from examples import check

NAMES = "layer_input", "hidden"


class Layer(eqx.Module):
    """Attention and MLP, each with its norm and residual sum."""

    norms: list[eqx.nn.RMSNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array):
        attention, up, down = jax.random.split(key, 3)
        self.norms = [eqx.nn.RMSNorm(width) for _ in range(2)]
        self.attention = eqx.nn.MultiheadAttention(4, width, key=attention)
        self.up = eqx.nn.Linear(width, 4 * width, key=up)
        self.down = eqx.nn.Linear(4 * width, width, key=down)

    def __call__(self, x: jax.Array, named: Callable[[jax.Array, str], jax.Array]) -> jax.Array:
        """One sequence."""
        x = named(x, "layer_input")
        n = jax.vmap(self.norms[0])(x)
        causal = np.tril(np.ones((len(x), len(x)), bool))
        x = x + self.attention(n, n, n, mask=causal)
        hidden = named(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)), "hidden")
        return x + jax.vmap(self.down)(jax.nn.gelu(hidden))


class Model(eqx.Module):
    """Embedding, layers in a loop, head."""

    embedding: eqx.nn.Embedding
    layers: Layer  # with a first axis over layers
    head: eqx.nn.Linear
    fp8: bool = eqx.field(static=True)

    def __init__(self, width: int, layers: int, fp8: bool, key: jax.Array):
        embedding, head, stack = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(check.VOCAB, width, key=embedding)
        self.head = eqx.nn.Linear(width, check.VOCAB, key=head)
        make = eqx.filter_vmap(lambda key: Layer(width, key))
        self.layers, self.fp8 = make(jax.random.split(stack, layers)), fp8

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the next tokens of one sequence."""
        named: Any = checkpoint_name
        policy: Any = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=list(NAMES),
            offload_src="device", offload_dst="pinned_host",
        )  # fmt: skip
        if self.fp8:
            named, policy = coat.save_fp8, coat.policies.save_fp8(*NAMES, offload=True)
        arrays, rest = eqx.partition(self.layers, eqx.is_array)

        def one(x: jax.Array, arrays: Any) -> tuple[jax.Array, None]:
            return eqx.combine(arrays, rest)(x, named), None

        block = jax.checkpoint(one, policy=policy, prevent_cse=False)
        x, _ = jax.lax.scan(block, jax.vmap(self.embedding)(tokens), arrays)
        return jax.vmap(self.head)(x)


def loss_of(model: Model, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of each token after the first."""
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(
    fp8: bool, data: Iterable[np.ndarray] | None = None, *, width: int = 128, layers: int = 4
) -> check.Run:
    """Trains on all devices."""
    mesh, tx = check.mesh("data"), optax.adamw(3e-3)

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        def loss_of_params(params: Any) -> jax.Array:
            return loss_of(eqx.combine(params, rest), tokens)

        loss, grads = jax.value_and_grad(loss_of_params)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    with jax.set_mesh(mesh):
        model = Model(width, layers, fp8, jax.random.key(0))
        params, rest = eqx.partition(model, eqx.is_array)
        state = tx.init(params)
        return check.train(step, params, state, data, mesh)


if __name__ == "__main__":
    check.compare_saved(train)
