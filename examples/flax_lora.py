"""LoRA in Flax: base weights frozen in FP8, 8-bit moments for the adapters alone.

    python -m examples.flax_lora

The model has Flax's own `nnx.LoRALinear`. `coat.nn.freeze` stores their weights in one byte a
parameter, and leaves their adapters alone. Without coat_jax both are in FP32. Adapters of a rank
below 16 have too few columns for 8-bit moments: their moments stay in FP32, and are small.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import coat_jax as coat
from examples import check

ADAPTERS = nnx.DiffState(0, nnx.LoRAParam)


class Block(nnx.Module):
    """A residual MLP over the token and the one before it, with adapters on both weights."""

    def __init__(self, width: int, rank: int, rngs: nnx.Rngs):
        lecun = nnx.initializers.lecun_normal()
        widen = nnx.with_partitioning(lecun, (None, "fsdp"))
        narrow = nnx.with_partitioning(lecun, ("fsdp", None))
        self.norm = nnx.RMSNorm(2 * width, rngs=rngs)
        self.up = nnx.LoRALinear(2 * width, 4 * width, lora_rank=rank, kernel_init=widen, rngs=rngs)
        self.down = nnx.LoRALinear(4 * width, width, lora_rank=rank, kernel_init=narrow, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies the layer."""
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return x + self.down(nnx.gelu(self.up(self.norm(jnp.concatenate([x, before], -1)))))


class Model(nnx.Module):
    """Embedding, layers, head."""

    def __init__(self, width: int, layers: int, rank: int, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(check.VOCAB, width, rngs=rngs)
        self.layers = nnx.List([Block(width, rank, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.LoRALinear(width, check.VOCAB, lora_rank=rank, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the next tokens."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss_of(model: Model, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of each token after the first."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    """One update of the adapters; returns the loss before it."""
    loss, grads = nnx.value_and_grad(loss_of, argnums=ADAPTERS)(model, tokens)
    optimizer.update(model, grads)
    return loss


def train(
    fp8: bool,
    data: Iterable[np.ndarray] | None = None,
    *,
    width: int = 128,
    layers: int = 1,
    rank: int = 128,
) -> check.Run:
    """Trains on all devices; `fp8` adds the two lines of coat_jax."""
    mesh = check.mesh("fsdp")
    with jax.set_mesh(mesh):
        model = Model(width, layers, rank, nnx.Rngs(0))
        tx = optax.adamw(3e-3)
        if fp8:
            model = coat.nn.freeze(model)
            tx = coat.optax.fp8_adamw(3e-3)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
        losses = []
        for tokens in check.sharded(data, mesh):
            losses.append(float(step(model, optimizer, tokens)))
        program = step.lower(model, optimizer, tokens).as_text()
    if fp8:
        weights = jax.tree.leaves(nnx.state(model, coat.nn.FrozenWeight))
        assert {leaf.dtype.name for leaf in weights if leaf.ndim} == {"float8_e4m3fn"}
    return check.Run(losses, nnx.state(model, nnx.LoRAParam), nnx.state(optimizer), program)


if __name__ == "__main__":
    check.compare(train, fp8_products=True)
