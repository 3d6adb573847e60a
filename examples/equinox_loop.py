"""Equinox: `coat.ops` in a module of its own, and 8-bit moments for its arrays.

    python -m examples.equinox_loop

coat_jax converts no Equinox modules, so the layer calls a function: `coat.ops.gated_mlp`, which
includes the norm and the residual sum, and saves its inputs in FP8.
"""

from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import coat_jax as coat
from examples import check


class GatedMLP(eqx.Module):
    """x + (silu(norm(x) gate) * (norm(x) up)) down, in the given precision."""

    scale: jax.Array
    gate: jax.Array
    up: jax.Array
    down: jax.Array
    precision: str = eqx.field(static=True)

    def __init__(self, width: int, precision: str, key: jax.Array):
        gate, up, down = jax.random.split(key, 3)
        lecun = jax.nn.initializers.lecun_normal()
        self.scale = jnp.ones(width)
        self.gate = lecun(gate, (width, 4 * width))
        self.up = lecun(up, (width, 4 * width))
        self.down = lecun(down, (4 * width, width))
        self.precision = precision

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer to the last axis."""
        norm = coat.ops.Norm(self.scale)
        return coat.ops.gated_mlp(x, norm, self.gate, self.up, self.down, precision=self.precision)


class Model(eqx.Module):
    """Embedding, layers, head: the next token from this one."""

    embedding: jax.Array
    layers: list[GatedMLP]
    head: jax.Array

    def __init__(self, width: int, layers: int, precision: str, key: jax.Array):
        embedding, head, *keys = jax.random.split(key, 2 + layers)
        self.embedding = jax.random.normal(embedding, (check.VOCAB, width))
        self.layers = [GatedMLP(width, precision, key) for key in keys]
        self.head = jax.random.normal(head, (width, check.VOCAB)) / width**0.5

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the next tokens."""
        x = self.embedding[tokens]
        for layer in self.layers:
            x = layer(x)
        return x @ self.head


def loss_of(model: Model, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of each token after the first."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train(
    fp8: bool, data: Iterable[np.ndarray] | None = None, *, width: int = 128, layers: int = 1
) -> check.Run:
    """Trains on all devices; `fp8` adds the two lines of coat_jax."""
    mesh = check.mesh("fsdp")
    tx = coat.optax.fp8_adamw(3e-3) if fp8 else optax.adamw(3e-3)

    @eqx.filter_jit
    def step(model: Model, state: Any, tokens: jax.Array) -> tuple[Model, Any, jax.Array]:
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, tokens)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    with jax.set_mesh(mesh):
        model = Model(width, layers, "coat" if fp8 else "bf16", jax.random.key(0))
        # Matrices are sharded over their first axis; jit copies vectors to every device.
        sharded = jax.NamedSharding(mesh, jax.P("fsdp"))
        model = jax.tree.map(lambda w: jax.device_put(w, sharded) if w.ndim > 1 else w, model)
        state = tx.init(eqx.filter(model, eqx.is_array))
        losses = []
        for tokens in check.sharded(data, mesh):
            model, state, loss = step(model, state, tokens)
            losses.append(float(loss))
        program = step.lower(model, state, tokens).as_text()
    return check.Run(losses, eqx.filter(model, eqx.is_array), state, program)


if __name__ == "__main__":
    check.compare(train, fp8_products=True)
