"""A Flax Linen model with a TrainState: another optimizer, and products in FP8.

    python -m examples.flax_linen

`nn.with_partitioning` boxes parameters with the names of their axes. The boxes are part of the tree
that the optimizer is initialized with, so the 8-bit moments and their scales are boxed, too, and
`nn.get_sharding` finds their shardings like those of any TrainState.
"""

from collections.abc import Iterable
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

import coat_jax as coat
from examples import check


class Block(nn.Module):
    """A decoder layer, whose products are what `dot_general_cls` makes."""

    width: int
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies attention and MLP, each with its norm and residual sum."""
        lecun = nn.initializers.lecun_normal()
        widen = nn.with_partitioning(lecun, (None, "fsdp"))
        narrow = nn.with_partitioning(lecun, ("fsdp", None))
        products = {"dot_general_cls": self.dot_general_cls}
        attention = nn.MultiHeadDotProductAttention(
            4, use_bias=False, qkv_dot_general_cls=self.dot_general_cls,
            out_dot_general_cls=self.dot_general_cls,
        )  # fmt: skip
        x = x + attention(nn.RMSNorm()(x), mask=nn.make_causal_mask(x[..., 0]))
        hidden = nn.Dense(4 * self.width, kernel_init=widen, **products)(nn.RMSNorm()(x))
        return x + nn.Dense(self.width, kernel_init=narrow, **products)(nn.gelu(hidden))


class Model(nn.Module):
    """Embedding, decoder layers, head."""

    width: int
    layers: int
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the next tokens."""
        x = nn.Embed(check.VOCAB, self.width)(tokens)
        for _ in range(self.layers):
            x = Block(self.width, self.dot_general_cls)(x)
        return nn.Dense(check.VOCAB, use_bias=False)(nn.RMSNorm()(x))


@jax.jit
def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
    """One update, and the loss before it."""

    def loss_of(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def train(
    fp8: bool, data: Iterable[np.ndarray] | None = None, *, width: int = 128, layers: int = 1
) -> check.Run:
    """Trains on all devices; `fp8` adds the two lines of coat_jax."""
    mesh = check.mesh("fsdp")
    model = Model(width, layers, coat.linen.dot_general_cls("coat") if fp8 else None)
    tx = coat.optax.fp8_adamw(3e-3) if fp8 else optax.adamw(3e-3)

    def initial(key: jax.Array) -> TrainState:
        params = model.init(key, np.zeros((1, 2), np.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    with jax.set_mesh(mesh):
        key = jax.random.key(0)
        shardings = nn.get_sharding(jax.eval_shape(initial, key), mesh)
        state = jax.jit(initial, out_shardings=shardings)(key)
        losses = []
        for tokens in check.sharded(data, mesh):
            state, loss = step(state, tokens)
            losses.append(float(loss))
        program = step.lower(state, tokens).as_text()
    return check.Run(losses, state.params, state.opt_state, program)


if __name__ == "__main__":
    check.compare(train, fp8_products=True)
