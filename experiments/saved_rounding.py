"""Why saved activations are rounded stochastically: what rounding does to the weights' gradients.

    python -m experiments.saved_rounding                 four minutes on two CPU cores
    python -m experiments.saved_rounding --steps 20 --batches 4

A small Llama learns from real text in FP32. At several steps the gradients of its layers' weights
are computed for many batches, once as they are and once with saved activations in FP8, rounded to
nearest or stochastically. Everything else is in FP32. For both ways the results have the error

    of a batch      |g' - g| / |mean g|            the root of the mean square over batches
    of the mean     |mean (g' - g)| / |mean g|     what is left of it after averaging

An error that is independent from batch to batch shrinks with the root of their number when it is
averaged, as it does over the steps of a training; an error that all batches have in common does
not. "in common" is the share of the residual stream's squared length that is the same for all
tokens.
"""

import dataclasses
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import track
from rich.table import Table

import coat_jax as coat
from coat_jax import models
from experiments import corpus, records
from experiments.command import parser_of
from experiments.moments.followed import WEIGHT_DECAY, schedule

MODEL = models.Config(
    vocab=256, width=128, layers=4, heads=4, kv_heads=4, head_dim=32, ffn=384, context=128,
    tied=True, scan=False, dtype=jnp.float32, precision=coat.BF16,
)  # fmt: skip
BATCH = 16
SHARE_OF_STEPS = (0.0, 0.025, 0.05, 0.1, 0.2, 0.4, 1.0)  # when gradients are compared
ROUNDINGS = {
    "to nearest": coat.Precision(fp8_linear=False, stochastic=False),
    "stochastic": coat.Precision(fp8_linear=False),
}
ERRORS = ("of a batch", "of the mean")

Figures = dict[str, Any]
Tokens = Int[Array, "B S+1"]


def main() -> None:
    """Measures, prints the table and writes the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of training")
    parser.add_argument("--batches", type=int, default=32, help="batches to average gradients over")
    parser.add_argument("--seed", type=int, default=0, help="seed of model and batches")
    options = parser.parse_args()
    figures = measure(options.steps, options.batches, options.seed)
    records.write(options.out / "saved_rounding.json", figures)
    show(figures)


def measure(steps: int, batches: int, seed: int) -> Figures:
    """The errors of gradients at several steps of a training."""
    began = time.perf_counter()
    text = corpus.batches(corpus.load().train, BATCH, MODEL.context, seed)
    compared = [*itertools.islice(text, batches)]
    graph, params = nnx.split(models.create(MODEL, seed=seed))
    graphs = {
        name: models.abstract(dataclasses.replace(MODEL, precision=precision))[0]
        for name, precision in ROUNDINGS.items()
    }

    def loss(graph: Any, params: Any, tokens: Tokens) -> Float[Array, ""]:
        return nnx.merge(graph, params).loss(tokens[:, :-1], tokens[:, 1:])

    optimizer = optax.adamw(schedule(steps), b2=0.95, weight_decay=WEIGHT_DECAY)

    @jax.jit
    def step(params: Any, state: Any, tokens: Tokens) -> Any:
        value, grads = jax.value_and_grad(loss, argnums=1)(graph, params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    @jax.jit
    def gradients(params: Any, tokens: Tokens) -> tuple[list[Array], dict[str, list[Array]]]:
        """Those of the layers' matrices, and what each rounding changes of them."""

        def of(graph: Any) -> list[Array]:
            grads = jax.grad(loss, argnums=1)(graph, params, tokens)
            return [leaf for leaf in jax.tree.leaves(grads["layers"]) if leaf.ndim == 2]

        exact = of(graph)
        changes = {
            name: [a - b for a, b in zip(of(rounded), exact, strict=True)]
            for name, rounded in graphs.items()
        }
        return exact, changes

    moments = {round(share * steps) for share in SHARE_OF_STEPS}
    state, losses, found = optimizer.init(params), [], []
    for number in track(range(steps + 1), description="training"):
        if number in moments:
            errors = _errors([gradients(params, tokens) for tokens in compared])
            shares = np.mean([_in_common(graph, params, t) for t in compared[:4]], axis=0)
            found.append({"step": number, "error": errors, "in common": shares.tolist()})
        if number < steps:
            params, state, value = step(params, state, next(text))
            losses.append(float(value))
    return {
        "training": {
            "width": MODEL.width,
            "layers": MODEL.layers,
            "steps": steps,
            "tokens a step": BATCH * MODEL.context,
            "first and last loss": [losses[0], losses[-1]],
            "seconds": round(time.perf_counter() - began),
        },
        "batches": batches,
        "found": found,
    }


def _errors(of_batches: list[tuple[list[Array], dict[str, list[Array]]]]) -> Figures:
    """By rounding, both errors over the matrices together."""
    mean = _length(_mean([exact for exact, _ in of_batches]))
    return {
        name: {
            "of a batch": float(
                np.sqrt(np.mean([_length(changes[name]) ** 2 for _, changes in of_batches])) / mean
            ),
            "of the mean": _length(_mean([changes[name] for _, changes in of_batches])) / mean,
        }
        for name in ROUNDINGS
    }


def _mean(trees: list[list[Array]]) -> list[np.ndarray]:
    return [np.mean(leaves, axis=0) for leaves in zip(*trees, strict=True)]


def _length(leaves: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in leaves)))


def _in_common(graph: Any, params: Any, tokens: Tokens) -> list[float]:
    """The share of each layer's input that is the same for all tokens."""
    model = nnx.merge(graph, params)
    x, shares = model.embedded(tokens[:, :-1]), []
    for layer in model.layers:
        shares.append(float(jnp.sum(jnp.mean(x, (0, 1)) ** 2) / jnp.mean(jnp.sum(x**2, -1))))
        x = layer(x)
    return shares


def show(figures: Figures) -> None:
    """Prints the errors."""
    table = Table(title="Error of the weights' gradients from rounding what is saved")
    for column in ("step", "in common", *(f"{n}, {e}" for n in ROUNDINGS for e in ERRORS)):
        table.add_column(column, justify="right")
    for one in figures["found"]:
        errors = (one["error"][name][error] for name in ROUNDINGS for error in ERRORS)
        common = f"{np.mean(one['in common']):.0%}"
        table.add_row(str(one["step"]), common, *(f"{error:.2%}" for error in errors))
    Console().print(table)


if __name__ == "__main__":
    main()
