"""A batch of random tokens, placed as the trainer places its batches."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coat_jax.training.cluster.mesh import abstract_batch
from coat_jax.training.config import TrainConfig
from coat_jax.training.data import Batch


def random_batch(config: TrainConfig, mesh: Mesh) -> Batch:
    """Tokens of which each predicts the next; the same ones each time."""
    like = abstract_batch(config, mesh)
    shape, vocab = like.tokens.shape, config.model.vocab
    tokens = jax.random.randint(jax.random.key(0), shape, 0, vocab, jnp.int32)
    tokens = jax.device_put(tokens, like.tokens.sharding)
    batch: Batch = like._replace(tokens=tokens, labels=jnp.roll(tokens, -1, -1))
    return batch
