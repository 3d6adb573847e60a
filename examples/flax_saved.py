"""A scanned Flax block with a checkpoint policy: its named arrays in FP8 instead of BF16.

    python -m examples.flax_saved

The block is written as in MaxText: `nn.scan` over `nn.remat`, and a policy that saves named arrays.
Three lines change: the import, what names the arrays, and the policy.
"""

from collections.abc import Callable, Iterable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import coat_jax as coat
from examples import check

NAMES = "query", "key", "value", "gate", "up"


class Block(nn.Module):
    """A decoder layer; `named` gives names to the outputs of its products."""

    width: int
    named: Callable[[jax.Array, str], jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        """Applies attention and MLP, each with its norm and residual sum."""

        def product(x: jax.Array, width: int, name: str) -> jax.Array:
            return self.named(nn.Dense(width, use_bias=False, name=name)(x), name)

        n = nn.RMSNorm()(x)
        heads = (product(n, self.width, name).reshape(*x.shape[:2], 4, -1) for name in NAMES[:3])
        attended = jax.nn.dot_product_attention(*heads, is_causal=True).reshape(x.shape)
        x = x + nn.Dense(self.width, use_bias=False)(attended)
        n = nn.RMSNorm()(x)
        gate, up = (product(n, 4 * self.width, name) for name in NAMES[3:])
        return x + nn.Dense(self.width, use_bias=False)(nn.silu(gate) * up), None


class Model(nn.Module):
    """Embedding, decoder layers in a loop, head."""

    width: int
    layers: int
    fp8: bool

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the next tokens."""
        named: Any = checkpoint_name
        policy: Any = jax.checkpoint_policies.save_only_these_names(*NAMES)
        if self.fp8:
            named, policy = coat.save_fp8, coat.policies.save_fp8(*NAMES)
        x = nn.Embed(check.VOCAB, self.width)(tokens)
        block = nn.remat(Block, policy=policy, prevent_cse=False)
        stack = nn.scan(
            block, length=self.layers, variable_axes={"params": 0}, split_rngs={"params": True}
        )
        x, _ = stack(self.width, named)(x)
        return nn.Dense(check.VOCAB, use_bias=False)(nn.RMSNorm()(x))


def train(
    fp8: bool, data: Iterable[np.ndarray] | None = None, *, width: int = 128, layers: int = 4
) -> check.Run:
    """Trains on all devices."""
    mesh, tx = check.mesh("data"), optax.adamw(3e-3)
    model = Model(width, layers, fp8)

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    with jax.set_mesh(mesh):
        params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
        state = jax.jit(tx.init)(params)
        return check.train(step, params, state, data, mesh)


if __name__ == "__main__":
    check.compare_saved(train)
