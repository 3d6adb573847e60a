"""A plain Flax NNX training loop: another optimizer, and a model that is converted.

    python -m examples.flax_nnx

Kernels are sharded by annotations, as Flax does it, and `nnx.Optimizer` shards the 8-bit moments
and their scales like them.
"""

from collections.abc import Iterable

import jax
import numpy as np
import optax
from flax import nnx

import coat_jax as coat
from examples import check


class Block(nnx.Module):
    """A decoder layer as anybody would write it in Flax."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        lecun = nnx.initializers.lecun_normal()
        widen = nnx.with_partitioning(lecun, (None, "fsdp"))
        narrow = nnx.with_partitioning(lecun, ("fsdp", None))
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, use_bias=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, kernel_init=widen, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, kernel_init=narrow, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies attention and MLP, each with its norm and residual sum."""
        causal = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.norm(x), mask=causal)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Model(nnx.Module):
    """Embedding, decoder layers, head."""

    def __init__(self, width: int, layers: int, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(check.VOCAB, width, rngs=rngs)
        self.layers = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, check.VOCAB, use_bias=False, rngs=rngs)

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
    """One update; returns the loss before it."""
    loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, grads)
    return loss


def train(
    fp8: bool, data: Iterable[np.ndarray] | None = None, *, width: int = 128, layers: int = 1
) -> check.Run:
    """Trains on all devices; `fp8` adds the two lines of coat_jax."""
    mesh = check.mesh("fsdp")
    with jax.set_mesh(mesh):
        model = Model(width, layers, nnx.Rngs(0))
        tx = optax.adamw(3e-3)
        if fp8:
            model = coat.nn.convert(model, coat.COAT, rules={"head": "bf16"})
            tx = coat.optax.fp8_adamw(3e-3)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        losses = []
        for tokens in check.sharded(data, mesh):
            losses.append(float(step(model, optimizer, tokens)))
        program = step.lower(model, optimizer, tokens).as_text()
    return check.Run(losses, nnx.state(model, nnx.Param), nnx.state(optimizer), program)


if __name__ == "__main__":
    check.compare(train, fp8_products=True)
