"""Optimizers that follow one training on its gradients, and how far their updates are from exact.

    error = sum (u' - u)^2 / sum u^2,    u of an exact optimizer, u' of one that is compared

The training is a small Llama's on real text, with an optimizer of its own. At every step all the
others receive its gradients and step on their own states, so that their errors accumulate as they
do in training.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array
from rich.progress import track

from experiments import corpus, records
from experiments.command import parser_of
from experiments.small_llama import Config, Llama, loss

CONFIG = Config(layers=2)
LEARNING_RATE, WEIGHT_DECAY = 3e-3, 0.1
MODEL = f"Llama over bytes: width {CONFIG.width}, {CONFIG.layers} layers, ffn {CONFIG.ffn}, FP32"
BATCH, SEQUENCE = 8, 128
SAMPLES = 30  # points of each curve
LAST = 3  # of these: their mean is the error at the end

# A tree of gradients as the matrices of each part of the model, by path.
Parts = Callable[[Any], dict[str, dict[str, Array]]]


class Comparison(NamedTuple):
    """Optimizers whose updates are compared with those of an exact one."""

    exact: optax.GradientTransformation
    compared: dict[str, optax.GradientTransformation]


class Followed(NamedTuple):
    """What `follow` returns.

    Attributes:
        steps: the last step of each interval.
        losses: of the training, one per step.
        errors: by comparison, optimizer and part, one per interval.
    """

    steps: list[int]
    losses: list[float]
    errors: dict[str, dict[str, dict[str, list[float]]]]

    def figures(self) -> dict[str, Any]:
        """What a results file has of it."""
        return {
            "training": {
                "model": MODEL,
                "steps": len(self.losses),
                "first and last loss": [self.losses[0], self.losses[-1]],
            },
            "step": self.steps,
            "error": self.errors,
            "at the end": {
                comparison: {
                    name: {part: float(np.mean(curve[-LAST:])) for part, curve in parts.items()}
                    for name, parts in of_all.items()
                }
                for comparison, of_all in self.errors.items()
            },
        }


class Experiment(NamedTuple):
    """What differs between experiments whose optimizers follow a training.

    Attributes:
        docstring: which --help shows.
        results: the name of the results file and of the picture.
        measure: takes the number of steps and the seed.
        draw: draws figures into a file.
        show: prints figures.
    """

    docstring: str | None
    results: str
    measure: Callable[[int, int], Followed]
    draw: Callable[[dict[str, Any], Path], None]
    show: Callable[[dict[str, Any]], None]

    def run(self, *, steps: int) -> None:
        """The command line: measures, writes figures and picture, and prints the table."""
        parser = parser_of(self.docstring)
        parser.add_argument("--steps", type=int, default=steps, help="of training")
        parser.add_argument("--seed", type=int, default=0, help="seed of model and batches")
        options = parser.parse_args()
        started = time.perf_counter()
        figures = self.measure(options.steps, options.seed).figures()
        figures["seconds"] = round(time.perf_counter() - started)
        records.write(options.out / f"{self.results}.json", figures)
        self.draw(figures, options.out / f"{self.results}.png")
        self.show(figures)


def schedule(steps: int) -> optax.Schedule:
    """The learning rate of a training."""
    return optax.warmup_cosine_decay_schedule(
        0.0, LEARNING_RATE, max(steps // 10, 1), steps, LEARNING_RATE / 10
    )


def follow(
    training: optax.GradientTransformation,
    comparisons: dict[str, Comparison],
    parts: Parts,
    *,
    steps: int,
    seed: int,
) -> Followed:
    """Trains, and measures the error of each optimizer's updates in each interval of the training.

    Args:
        training: the optimizer of the training.
        comparisons: what follows it, by name.
        parts: what of a gradient they receive.
        steps: of the training.
        seed: of model and batches.
    """
    tokens = corpus.batches(corpus.load().train, BATCH, SEQUENCE, seed)
    graph, params = nnx.split(Llama(CONFIG, rngs=nnx.Rngs(seed)), nnx.Param)
    every = {name: {"": c.exact, **c.compared} for name, c in comparisons.items()}

    def one(carry: Any, tokens: Array) -> Any:
        params, trained, states = carry
        value, grads = jax.value_and_grad(lambda p: loss(nnx.merge(graph, p), tokens))(params)
        updates, trained = training.update(grads, trained, params)
        given = parts(grads)
        squares: dict[str, Any] = {}
        for name, optimizers in every.items():
            directions = {}
            for key, tx in optimizers.items():
                directions[key], states[name][key] = tx.update(given, states[name][key])
            exact = directions.pop("")
            squares[name] = {
                part: {
                    "": _square(exact[part]),
                    **{key: _distance(u[part], exact[part]) for key, u in directions.items()},
                }
                for part in exact
            }
        return (optax.apply_updates(params, updates), trained, states), (value, squares)

    @jax.jit
    def interval(carry: Any, tokens: Array) -> tuple[Any, Any, Any]:
        carry, (losses, squares) = jax.lax.scan(one, carry, tokens)
        return carry, losses, jax.tree.map(lambda x: x.sum(axis=0), squares)

    zeros = jax.tree.map(jnp.zeros_like, parts(params))
    states = {
        name: {key: tx.init(zeros) for key, tx in each.items()} for name, each in every.items()
    }
    carry = (params, training.init(params), states)
    length = max(steps // SAMPLES, 1)
    ends, losses, sums = list(range(length, steps + 1, length)), [], []
    for _ in track(ends, "training"):
        batch = jnp.stack([jnp.asarray(next(tokens)) for _ in range(length)])
        carry, values, squares = interval(carry, batch)
        losses += np.asarray(values).tolist()
        sums.append(jax.tree.map(float, squares))
    errors = {
        name: {
            key: {part: [s[name][part][key] / s[name][part][""] for s in sums] for part in zeros}
            for key in comparison.compared
        }
        for name, comparison in comparisons.items()
    }
    return Followed(ends, losses, errors)


def _square(tree: Any) -> Array:
    return sum((jnp.sum(x * x) for x in jax.tree.leaves(tree)), jnp.zeros([]))


def _distance(tree: Any, other: Any) -> Array:
    return _square(jax.tree.map(lambda a, b: a.astype(jnp.float32) - b, tree, other))
