"""The learning rate over a run.

It rises linearly for `warmup_steps`. What follows depends on the name of the schedule:

cosine      half a cosine, down to `final_ratio` of the highest rate
linear      a straight line, down to the same rate
wsd         constant, with a linear decay in the last `decay_steps`
constant    constant
"""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from coat_jax.training.config import OptimizerConfig


def learning_rate(
    config: OptimizerConfig, total_steps: int, count: Int[ArrayLike, ""]
) -> Float[Array, ""]:
    """Returns the learning rate of the update after `count` others.

    Args:
        config: the highest rate, and the shape.
        total_steps: of the run.
        count: from 0 to total_steps - 1.
    """
    done = jnp.asarray(count, jnp.float32)
    rising, at_end = config.phases(total_steps)
    stable = total_steps - at_end if config.schedule == "wsd" else rising
    # The fraction of the decay that is done; one step after the last it would be 1.
    progress = jnp.clip((done - stable) / max(total_steps - stable, 1), 0.0, 1.0)
    shapes = {"cosine": (1 + jnp.cos(jnp.pi * progress)) / 2, "constant": jnp.ones([])}
    factor = shapes.get(config.schedule, 1 - progress)
    falling = config.final_ratio + (1 - config.final_ratio) * factor
    return config.learning_rate * jnp.where(done < rising, (done + 1) / max(rising, 1), falling)
