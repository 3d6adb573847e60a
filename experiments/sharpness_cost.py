"""What it costs to record sharpness while training.

    python -m experiments.sharpness_cost                           on a GPU
    python -m experiments.sharpness_cost --batch 1 --tokens 32     smoke test, anywhere

The gradients of `llama_124m` in BF16 are computed in three ways: with the loss alone, as in the
trainer; with the logits of all tokens as well, which the loss does not need all at once; and with
the sharpness of these logits. The first difference is the cost of logits for a loop that has none,
the second that of sharpness itself. The three ways alternate, and times are medians.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.table import Table

from coat_jax import BF16, models, ops
from coat_jax.training.config_files import load_config
from experiments import records
from experiments.command import parser_of
from experiments.stacks import medians_ms

CONFIG = "llama_124m"
BATCH, TOKENS = 8, 1024
WAYS = ("the loss", "logits too", "sharpness too")


def loss_of(
    model: models.Llama, tokens: Int[Array, "B S"], labels: Int[Array, "B S"], *, way: str
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The loss, and what is recorded: nothing, the largest logit, or the mean sharpness."""
    hidden = model.hidden(tokens)
    loss = ops.cross_entropy(hidden, model.head_weight(), labels)
    if way == "the loss":
        return loss, jnp.zeros(())
    logits = jax.lax.stop_gradient(model.logits(hidden))
    if way == "logits too":
        return loss, jnp.max(logits)
    return loss, jnp.mean(ops.sharpness(logits, labels))


def measure(batch: int, tokens: int) -> dict[str, Any]:
    """How many milliseconds the gradients of a batch take, by what else is computed."""
    config = dataclasses.replace(load_config(CONFIG).model, precision=BF16)
    model = models.create(config)
    graph, params = nnx.split(model)
    text = jax.random.randint(jax.random.key(0), (2, batch, tokens), 0, config.vocab)

    def step(way: str) -> tuple[Any, Any]:
        def loss(params: Any) -> Any:
            return loss_of(nnx.merge(graph, params), *text, way=way)

        program = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params).compile()
        latest: list[Any] = []

        def run() -> None:
            latest[:] = [program(params)]

        return run, lambda: jax.block_until_ready(latest)

    ms = medians_ms({number: step(way) for number, way in enumerate(WAYS)})
    return {
        "config": CONFIG,
        "batch": batch,
        "tokens": tokens,
        "vocab": config.vocab,
        "ms": {way: ms[number] for number, way in enumerate(WAYS)},
    }


def shares(figures: dict[str, Any]) -> dict[str, float]:
    """The time that logits and sharpness add, as shares of that of the loss and its gradients."""
    alone, logits, both = (figures["ms"][way] for way in WAYS)
    return {"logits": (logits - alone) / alone, "sharpness": (both - logits) / alone}


def main() -> None:
    """Measures, writes the results and prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences (%(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a sequence (%(default)s)")
    options = parser.parse_args()
    figures = measure(options.batch, options.tokens)
    records.write(options.out / "sharpness_cost.json", figures)
    table = Table(title=f"Gradients of {CONFIG}, {options.batch} x {options.tokens} tokens")
    for column in ("computed", "ms"):
        table.add_column(column, justify="left" if column == "computed" else "right")
    for way, ms in figures["ms"].items():
        table.add_row(way, f"{ms:.2f}")
    console = Console()
    console.print(table)
    costs = (f"{name} {100 * share:+.1f} %" for name, share in shares(figures).items())
    console.print(f"Beside the loss: {', '.join(costs)}")


if __name__ == "__main__":
    main()
