"""A small Llama that has learnt real text, and held-out text on which its arrays are recorded."""

from typing import NamedTuple

import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int
from rich.progress import track

from experiments import corpus
from experiments.small_llama import Config, Llama, loss

CONFIG = Config(width=256, layers=5, heads=4, ffn=768)
BATCH, RECORDED, SEQUENCE, RATE, SEED = 8, 16, 128, 1e-3, 0


class Trained(NamedTuple):
    """What training made.

    Attributes:
        model: with the parameters after the last step.
        tokens: a batch of held-out text.
        losses: of the first step and of the last one.
        corpus: the digest of the text.
    """

    model: Llama
    tokens: Int[Array, "B S+1"]
    losses: dict[str, float]
    corpus: str


def train(steps: int) -> Trained:
    """Trains in FP32."""
    text = corpus.load()
    data = corpus.batches(text.train, BATCH, SEQUENCE, SEED)
    model = Llama(CONFIG, rngs=nnx.Rngs(SEED))
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, steps // 10, steps, RATE / 10)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)

    @nnx.jit
    def step(model: Llama, optimizer: nnx.Optimizer, tokens: Array) -> Array:
        value, gradients = nnx.value_and_grad(loss)(model, tokens)
        optimizer.update(model, gradients)
        return value

    losses = [float(step(model, optimizer, next(data))) for _ in track(range(steps), "training")]
    tokens = jnp.asarray(next(corpus.batches(text.held_out, RECORDED, SEQUENCE, SEED)))
    return Trained(model, tokens, {"first": losses[0], "last": losses[-1]}, text.digest)
