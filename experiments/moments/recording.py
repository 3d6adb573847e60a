"""Adam's moments as they are in training: a small Llama on real text, recorded along the way.

    record(b2, ...) -> the (m, v) of every matrix, in FP32, at several steps

The moments are those of `optax.adamw` on FP32 parameters; nothing here is quantized. Recorded
are the leaves that coat_jax would store in FP8, which leaves out the norms.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float
from rich.progress import track

from coat_jax.storage import Storage
from experiments import corpus
from experiments.small_llama import Config, Llama, loss

CONFIG = Config(width=256, layers=4, heads=4, ffn=1024)
MODEL = f"Llama over bytes: width {CONFIG.width}, {CONFIG.layers} layers, ffn {CONFIG.ffn}, FP32"
BATCH, SEQUENCE = 8, 128
B1, EPS = 0.9, 1e-8
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1
COLUMNS = 256  # of the rows below: no group crosses a row, as in coat_jax

Rows = Float[Array, "N D"]


class Moments(NamedTuple):
    """Rows of the moments of many matrices, of the same step."""

    m: Rows
    v: Rows
    step: int
    b2: float

    def direction(self, m: Rows, v: Rows) -> Rows:
        """What Adam makes of m and v at this step, before the learning rate and without eps."""
        return m / (1 - B1**self.step) / jnp.sqrt(v / (1 - self.b2**self.step))


@dataclasses.dataclass(frozen=True)
class Recording:
    """The moments of one step: by name, one pair per matrix."""

    step: int
    b2: float
    m: dict[str, Float[np.ndarray, "..."]]
    v: dict[str, Float[np.ndarray, "..."]]

    def layers(self) -> Moments:
        """The matrices of all layers."""
        return self._stack([name for name in self.m if "layers" in name])

    def tables(self) -> Moments:
        """Embedding and head, where each row or column belongs to a byte, common or rare."""
        return self._stack([name for name in self.m if "layers" not in name])

    def _stack(self, names: list[str]) -> Moments:
        m, v = (
            jnp.concatenate([moment[name].reshape(-1, COLUMNS) for name in names])
            for moment in (self.m, self.v)
        )
        return Moments(m, v, self.step, self.b2)


def record(b2: float, steps: int, seed: int) -> list[Recording]:
    """Trains for `steps` steps; returns the moments at 1/8, 1/4, 1/2 and all."""
    tokens = corpus.batches(corpus.load().train, BATCH, SEQUENCE, seed)
    graph, params = nnx.split(Llama(CONFIG, rngs=nnx.Rngs(seed)), nnx.Param)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, LEARNING_RATE, max(steps // 10, 1), steps, LEARNING_RATE / 10
    )
    tx = optax.adamw(schedule, b1=B1, b2=b2, eps=EPS, weight_decay=WEIGHT_DECAY)

    @jax.jit
    def step(params: Any, state: Any, tokens: Any) -> tuple[Any, Any]:
        grads = jax.grad(lambda p: loss(nnx.merge(graph, p), tokens))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    wanted = {math.ceil(steps * part) for part in (1 / 8, 1 / 4, 1 / 2, 1)}
    recordings = []
    for t in track(range(1, steps + 1), f"training, b2 = {b2}"):
        params, state = step(params, state, next(tokens))
        if t in wanted:
            recordings.append(Recording(t, b2, _matrices(state[0].mu), _matrices(state[0].nu)))
    return recordings


def _matrices(moment: Any) -> dict[str, Float[np.ndarray, "..."]]:
    """The leaves that coat_jax stores in FP8, by path."""
    quantizes = Storage().quantizes
    leaves = jax.tree_util.tree_leaves_with_path(moment)
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves if quantizes(x.shape)}
