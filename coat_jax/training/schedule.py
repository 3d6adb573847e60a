"""The learning rate over a run.

rises in a straight line for `warmup` of the steps, then by name
cosine      half a cosine down to `final` of the peak
linear      a straight line down to it
wsd         stays, and falls in a straight line in the last `cooldown` of the steps
constant    stays
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from coat_jax.training.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, steps: int, count: Int[Array, ""]) -> Float[Array, ""]:
    """The rate of the update that follows `count` others.

    Args:
        config: peak and shape.
        steps: of the run.
        count: from 0 to steps - 1.
    """
    done = count.astype(jnp.float32)
    rising = round(config.warmup * steps)
    stable = steps - round(config.cooldown * steps) if config.schedule == "wsd" else rising
    # The share of the way down; one step after the last it would be 1.
    way = jnp.clip((done - stable) / max(steps - stable, 1), 0.0, 1.0)
    shapes = {"cosine": (1 + jnp.cos(jnp.pi * way)) / 2, "constant": jnp.ones([])}
    height = shapes.get(config.schedule, 1 - way)
    falling = config.final + (1 - config.final) * height
    return config.peak * jnp.where(done < rising, (done + 1) / max(rising, 1), falling)
