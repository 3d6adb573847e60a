"""What other 8-bit formats of the forward products' operands would cost in loss.

    python -m experiments.forward_formats                fifteen minutes on two CPU cores
    python -m experiments.forward_formats --steps 20 --seeds 0

A small Llama learns from real text in FP32. Then its held-out loss is measured with inputs and
weights of all layers' products rounded to a format; products and sums are in FP32. An operand has
one scale, as in COAT, or one for each row that is multiplied: each token of the inputs, each column
of a weight. The model may have been balanced before (`coat_jax.quantization.balance`).

Outliers are planted in the parameters: the scales of norms, and the columns of value and up, have
every 64th element multiplied by a factor, and the rows of the weights after them are divided by it.
Without rounding the model computes the same. Balancing undoes just this; outliers whose weights are
as large as others only become smaller.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float
from rich.console import Console
from rich.progress import track
from rich.table import Table

import coat_jax as coat
from coat_jax import models, quantization
from coat_jax.kernels import gemm
from coat_jax.numerics.quantizer import Quantizer
from coat_jax.training.data.corpus import Corpus
from experiments import corpus, records
from experiments.command import parser_of
from experiments.moments.followed import WEIGHT_DECAY, schedule
from experiments.study.statistics import Cost, cost_of


class Way(NamedTuple):
    """How operands are rounded, and whether the model was balanced before."""

    quantizer: Quantizer
    balanced: bool = False


FORMATS = {
    "E4M3, one scale": Way(Quantizer("E4M3")),
    "E4M3, a scale for each row": Way(Quantizer("E4M3", over="channel", axis=0)),
    "INT8, one scale": Way(Quantizer("INT8")),
    "INT8, a scale for each row": Way(Quantizer("INT8", over="channel", axis=0)),
    "INT8, a scale for each row, balanced": Way(Quantizer("INT8", over="channel", axis=0), True),
}
OUTLIERS = (10, 30, 100)  # factors
COLUMNS = {1: "both"} | {factor: f"outliers of {factor}" for factor in OUTLIERS}  # of the results
MODEL = models.Config(
    vocab=256, width=128, layers=4, heads=4, kv_heads=4, head_dim=32, ffn=384, context=128,
    tied=True, scan=False, dtype=jnp.float32, precision=coat.BF16,
)  # fmt: skip
BATCH = 16
APART = 64  # columns from one outlier to the next
HELD_OUT = 64  # batches
SEEN = 16  # batches of the training text, for balancing
# By the path in a layer: what makes outliers, and what multiplies them.
BEFORE = {"attention.norm.scale", "attention.value", "mlp.norm.scale", "mlp.up"}
AFTER = {
    *("attention.query", "attention.key", "attention.value", "attention.out"),
    *("mlp.gate", "mlp.up", "mlp.down"),
}

Figures = dict[str, Any]


def main() -> None:
    """Measures, prints the table and writes the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=600, help="of training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the models")
    options = parser.parse_args()
    text = corpus.load()
    found = [measure(text, options.steps, seed) for seed in options.seeds]
    figures = {"model": "Llama over bytes: width 128, 4 layers, FP32", "steps": options.steps}
    figures |= {"seeds": found}
    records.write(options.out / "forward_formats.json", figures)
    header, *rows = outlier_table(figures)
    shown = Table(*header, title="Held-out loss above exact products, by outliers")
    for row in rows:
        shown.add_row(*row)
    Console(width=120).print(shown)


def measure(text: Corpus, steps: int, seed: int) -> Figures:
    """The held-out loss of a trained model, exact and by format and outliers."""
    graph, params = trained(text, steps, seed)
    batches = corpus.batches(text.held_out, BATCH, MODEL.context, seed)
    held_out = [*itertools.islice(batches, HELD_OUT)]
    batches = corpus.batches(text.train, BATCH, MODEL.context, seed)
    seen = [tokens[:, :-1] for tokens in itertools.islice(batches, SEEN)]

    def loss(params: Any) -> float:
        of_batch = jax.jit(lambda tokens: _loss(graph, params, tokens))
        return float(np.mean([of_batch(tokens) for tokens in held_out]))

    def balanced(params: Any) -> Any:
        return nnx.state(quantization.balance(nnx.merge(graph, params), seen))

    found: Figures = {"seed": seed, "exact": loss(params)} | {name: {} for name in FORMATS}
    for factor, column in track(COLUMNS.items(), description=f"evaluating seed {seed}"):
        planted = with_outliers(params, factor)
        known = {False: planted, True: balanced(planted)}
        for name, way in FORMATS.items():
            with rounding(way.quantizer):
                found[name][column] = loss(known[way.balanced])
    return found


def trained(text: Corpus, steps: int, seed: int) -> tuple[Any, Any]:
    """A model after its training: its graph and its parameters."""
    graph, params = nnx.split(models.create(MODEL, seed=seed))
    optimizer = optax.adamw(schedule(steps), b2=0.95, weight_decay=WEIGHT_DECAY)

    @jax.jit
    def step(params: Any, state: Any, tokens: Array) -> Any:
        grads = jax.grad(_loss, argnums=1)(graph, params, tokens)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    batches = corpus.batches(text.train, BATCH, MODEL.context, seed)
    for _ in track(range(steps), description=f"training seed {seed}"):
        params, state = step(params, state, next(batches))
    return graph, params


def with_outliers(params: Any, factor: float) -> Any:
    """Parameters that compute the same, with columns of all inputs that are `factor` as large."""
    flat = dict(nnx.to_flat_state(params))
    for path, leaf in flat.items():
        part, value = ".".join(map(str, path[2:])), leaf[...]
        if part in BEFORE:
            value = value.at[..., ::APART].multiply(factor)
        if part in AFTER:
            value = value.at[::APART].divide(factor)
        flat[path] = leaf.replace(value)
    return nnx.from_flat_state(flat)


def _loss(graph: Any, params: Any, tokens: Array) -> Float[Array, ""]:
    return nnx.merge(graph, params).loss(models.Batch(tokens[:, :-1], tokens[:, 1:])).mean


@contextlib.contextmanager
def rounding(quantizer: Quantizer) -> Iterator[None]:
    """Layers traced in this context round the operands of their products."""
    exact = gemm.product

    def product(x: gemm.Operand, w: gemm.Operand, dtype: Any) -> Any:
        assert x.values is not None
        assert w.values is not None
        inputs, weights = _rounded(x.values, quantizer), _rounded(w.values.T, quantizer).T
        return exact(x._replace(values=inputs), w._replace(values=weights), dtype)

    gemm.product = product
    jax.clear_caches()  # of layers that were traced before
    try:
        yield
    finally:
        gemm.product = exact
        jax.clear_caches()


def _rounded(x: Any, quantizer: Quantizer) -> Array:
    """An array whose rows, along the last axis, are rounded together or each by itself."""
    return quantizer(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def outlier_table(figures: Figures) -> list[list[str]]:
    """The costs by format and size of the outliers, with a header."""

    def cost(name: str, column: str) -> Cost:
        return cost_of([math.log(one[name][column] / one["exact"]) for one in figures["seeds"]])

    rows = [["format", "none", *(f"{factor:g} times as large" for factor in OUTLIERS)]]
    for name in FORMATS:
        rows.append([name, *(str(cost(name, column)) for column in COLUMNS.values())])
    return rows


if __name__ == "__main__":
    main()
