"""The layers of a small Llama that has learnt real text, with what goes through them.

Inputs of norms and MLPs are recorded on held-out text, and so are the gradients of their outputs.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from experiments.small_llama import Layer, Llama, loss
from experiments.trained_llama import CONFIG, RECORDED, SEQUENCE, train

Rows = Float[Array, "T D"]


class Recorded(NamedTuple):
    """A layer and its arrays, a row for each token; `d` are the gradients of the loss for them."""

    layer: Layer
    x: Rows  # the input of attention's norm
    y: Rows  # that of the MLP's norm
    gate: Rows
    up: Rows
    dn: Rows  # of attention's norm's output
    dm: Rows  # of the MLP's norm's output
    da: Rows  # of the activation's output
    dz: Rows  # of the MLP's output


def record(steps: int) -> tuple[list[Recorded], dict[str, Any]]:
    """All layers after `steps` steps of training, and what a results file says of it."""
    model, tokens, losses, digest = train(steps)
    narrow, wide = (jnp.zeros((RECORDED, SEQUENCE, d)) for d in (CONFIG.width, CONFIG.ffn))
    probes = [(narrow, narrow, wide, narrow)] * CONFIG.layers
    walk = nnx.jit(nnx.grad(_walk, argnums=1, has_aux=True))
    gradients, (value, taken) = walk(model, probes, tokens)
    np.testing.assert_allclose(value, loss(model, tokens), rtol=1e-5)  # it is the same model
    layers = [
        Recorded(layer, *(a.reshape(-1, a.shape[-1]) for a in (*inputs, *outputs)))
        for layer, inputs, outputs in zip(model.layers, taken, gradients, strict=True)
    ]
    losses |= {"held out": float(value)}
    return layers, {"steps": steps, "loss": losses, "corpus": digest}


def _walk(model: Llama, probes: Any, tokens: Array) -> Any:
    """The loss and the inputs; `probes` are zeros whose gradients are those of the outputs."""
    x = model.embed(tokens[:, :-1])
    taken = []
    for layer, (first, second, third, last) in zip(model.layers, probes, strict=True):
        before = x
        x = before + layer.attention(layer.attention_norm(before) + first)
        n = layer.mlp_norm(x) + second
        gate, up = layer.mlp.gate(n), layer.mlp.up(n)
        taken.append((before, x, gate, up))
        x = x + layer.mlp.down(nnx.silu(gate) * up + third) + last
    logits = model.head(model.norm(x))
    value = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return value, (value, taken)
