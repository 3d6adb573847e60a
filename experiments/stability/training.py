"""All seeds and learning rates of an arm as one program: `vmap` over runs, `scan` over steps.

    run = (seed, learning rate)
    step of all runs = vmap(step)(states, seeds, learning rates)

A seed decides the initial parameters and the batches: windows of the text that start anywhere. Arms
and learning rates therefore share both, seed by seed. The learning rate is an input of the program,
so a grid is compiled once for each arm.

A step is that of the trainer: gradients are clipped by their norm, AdamW decays matrices, and a
step whose loss or gradients are not finite changes nothing. Loss, gradient norm (before clipping)
and sharpness are recorded at every step; sharpness costs little, since the logits are there.

Results do not depend on which runs share a program, up to rounding; the random numbers of
stochastic rounding do, since each run of a program has its own.
"""

import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int, Int32, UInt8

from coat_jax import models
from coat_jax.optax import scale_by_fp8_adam
from coat_jax.optax.clipping import clip_scale, global_norm
from coat_jax.optax.rounding import RoundParams, round_stepped
from coat_jax.training.data import corpus
from experiments import row_files
from experiments.row_files import Row
from experiments.stability.arm import PARTS, Arm, Settings, Size, model_config
from experiments.stability.arms import ARMS, SIZES
from experiments.stability.curves import Signals, packed
from experiments.stability.events import entropy, events_of
from experiments.stability.sharpness import sharpness
from experiments.stability.unscaled import without_scales
from experiments.study.study import Job
from experiments.study.worker import say

B1, B2, EPS = 0.9, 0.95, 1e-8


class State(NamedTuple):
    """The state of one run, or of many along a first axis."""

    params: Any
    moments: Any
    skipped: Int32[Array, ""]  # steps that were not finite


class Grid(NamedTuple):
    """What a grid left: signals [runs, steps], and how many steps of each run were skipped."""

    signals: Signals
    skipped: Int32[np.ndarray, " runs"]


class Program(NamedTuple):
    """The functions of a grid.

    Attributes:
        init: seeds [runs] to states.
        step: (states, text, seeds, learning rates, number of the step) to states and signals
            [runs].
        advance: a tenth of the steps; it takes the number of the first one. Signals [steps, runs].
    """

    init: Callable[..., State]
    step: Callable[..., tuple[State, Signals]]
    advance: Callable[..., tuple[State, Signals]]


def measure(job: Job) -> list[Row]:
    """Makes a run; see `Study`. Its rows differ by their learning rates."""
    begin = time.perf_counter()
    first, text = job.rows[0], corpus.load().train
    settings = Settings(**first["settings"])
    seeds = np.concatenate([row["seeds"] for row in job.rows])
    rates = np.repeat([row["learning_rate"] for row in job.rows], len(first["seeds"]))

    def report(step: int) -> None:
        job.stop_if_asked()
        say(job, f"{step}/{settings.steps}")

    arm, size = ARMS[first["arm"]], SIZES[first["size"]]
    grid = train(arm, size, settings, text, seeds, rates, report)
    seconds = (time.perf_counter() - begin) / len(seeds)
    ceiling = entropy(text)
    return [
        row | of_runs(grid, slice(at, at + len(row["seeds"])), ceiling, settings.every, seconds)
        for at, row in zip(range(0, len(seeds), len(first["seeds"])), job.rows, strict=True)
    ]


def of_runs(grid: Grid, own: slice, ceiling: float, every: int, seconds: float) -> Row:
    """What a row has of some runs of a grid.

    Args:
        grid: of all runs.
        own: which of them.
        ceiling: the loss without learning, see `events`.
        every: one of so many steps is stored.
        seconds: of a run, as its share of the program's time.
    """
    signals = np.stack(grid.signals)[:, own]
    events = [events_of(losses, ceiling) for losses in signals[0]]
    return {
        "ceiling": _rounded(ceiling),
        "final": [_rounded(one.final) for one in events],
        "outcome": [one.outcome for one in events],
        "onset": [one.onset for one in events],
        "skipped": [int(steps) for steps in grid.skipped[own]],
        "curves": packed(signals[:, :, ::every]),
        "seconds": round(seconds, 2),
        "parents": row_files.parents(),
    }


def _rounded(value: float) -> float | None:
    """Four digits; None for infinity, which JSON does not have."""
    return float(f"{value:.4g}") if np.isfinite(value) else None


def train(
    arm: Arm,
    size: Size,
    settings: Settings,
    text: UInt8[np.ndarray, " N"],
    seeds: Int[np.ndarray, " runs"],
    learning_rates: Float[np.ndarray, " runs"],
    report: Callable[[int], object] = lambda step: None,
) -> Grid:
    """Trains all runs side by side.

    Args:
        arm: how.
        size: what.
        settings: of each run.
        text: where windows are taken from.
        seeds: of each run.
        learning_rates: of each run, the highest.
        report: called with the number of steps that are done, before each part of the runs.
    """
    program = program_of(arm, size, settings)
    seeds = jnp.asarray(seeds, jnp.uint32)
    rates = jnp.asarray(learning_rates, jnp.float32)
    tokens = jnp.asarray(text)
    states = program.init(seeds)
    parts = []
    for first in range(0, settings.steps, settings.steps // PARTS):
        report(first)
        states, signals = program.advance(states, tokens, seeds, rates, first)
        parts.append(jax.tree.map(np.asarray, signals))
    whole = [np.concatenate(part).T for part in zip(*parts, strict=True)]
    return Grid(Signals(*whole), np.asarray(states.skipped))


def program_of(arm: Arm, size: Size, settings: Settings) -> Program:
    """The program of a grid. If the arm has no scales, they are left out while it is traced."""
    config = model_config(arm, size)
    graph = models.abstract(config)[0]
    tx = optimizer(arm, config, settings)
    of_one_run = partial(one_step, arm, graph, tx, settings)

    @jax.jit
    def init(seeds: Array) -> State:
        return jax.vmap(partial(new_state, config, tx))(seeds)

    def step(
        states: State, text: Array, seeds: Array, rates: Array, number: Array
    ) -> tuple[State, Signals]:
        with contextlib.nullcontext() if arm.scaled else without_scales():
            return jax.vmap(of_one_run, (0, None, 0, 0, None))(states, text, seeds, rates, number)

    @partial(jax.jit, donate_argnums=0)
    def advance(
        states: State, text: Array, seeds: Array, rates: Array, first: Array
    ) -> tuple[State, Signals]:
        numbers = first + jnp.arange(settings.steps // PARTS)
        return lax.scan(lambda states, n: step(states, text, seeds, rates, n), states, numbers)

    return Program(init, step, advance)


def new_state(config: models.Config, tx: optax.GradientTransformation, seed: Array) -> State:
    """A run before its first step."""
    params = nnx.state(models.Llama(config, rngs=nnx.Rngs(jax.random.key(seed))))
    return State(params, tx.init(_in_fp32(params)), jnp.zeros([], jnp.int32))


def one_step(
    arm: Arm,
    graph: Any,
    tx: optax.GradientTransformation,
    settings: Settings,
    state: State,
    text: UInt8[Array, " N"],
    seed: Array,
    rate: Float[Array, ""],
    number: Int[Array, ""],
) -> tuple[State, Signals]:
    """The next state of a run, and how the step went."""
    batch = windows(settings, text, seed, number)
    loss_of = jax.value_and_grad(partial(loss_and_sharpness, graph), has_aux=True)
    (loss, sharpness), grads = loss_of(state.params, batch)
    grads = _in_fp32(grads)
    norm = global_norm(grads)
    scale = clip_scale(norm, settings.clip_norm)
    grads = jax.tree.map(lambda g: g * scale, grads)
    wide = _in_fp32(state.params)
    updates, moments = tx.update(grads, state.moments, wide)
    now = rate * shape_of_rate(settings, number)
    updates = jax.tree.map(lambda u: -now * u, updates)
    stepped = optax.apply_updates(wide, updates)
    how: RoundParams = "stochastic" if arm.params == "bf16_stochastic" else "nearest"
    params, _ = round_stepped(stepped, state.params, how=how, seed=0, step=number)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), (params, moments), state[:2])
    return State(*new, state.skipped + ~finite), Signals(loss, norm, sharpness)


def windows(
    settings: Settings, text: UInt8[Array, " N"], seed: Array, number: Array
) -> Int32[Array, "B S+1"]:
    """The batch of a step."""
    key = jax.random.fold_in(jax.random.key(seed), number)
    last = len(text) - settings.sequence
    starts = jax.random.randint(key, (settings.batch, 1), 0, last)
    return text[starts + jnp.arange(settings.sequence + 1)].astype(jnp.int32)


def loss_and_sharpness(
    graph: Any, params: Any, batch: Int32[Array, "B S+1"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The means over all bytes of cross-entropy and sharpness."""
    model = nnx.merge(graph, params)
    logits, labels = model.logits(model.hidden(batch[:, :-1])), batch[:, 1:]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, sharpness(lax.stop_gradient(logits), labels).mean()


def optimizer(arm: Arm, config: models.Config, settings: Settings) -> optax.GradientTransformation:
    """AdamW's direction, to be multiplied by the learning rate."""

    def decays(path: Any, leaf: Array) -> bool:
        return leaf.ndim - (config.scan and path[0].key == "layers") >= 2

    if arm.moments is None:
        adam = optax.scale_by_adam(B1, B2, EPS)
    else:
        adam = scale_by_fp8_adam(B1, B2, EPS, storage=arm.moments, implementation="xla")
    mask = partial(jax.tree.map_with_path, decays)
    return optax.chain(adam, optax.add_decayed_weights(settings.weight_decay, mask))


def shape_of_rate(settings: Settings, number: Int[Array, ""]) -> Float[Array, ""]:
    """The share of the highest learning rate: a straight line up, then half a cosine."""
    rising = max(round(settings.warmup * settings.steps), 1)
    way = jnp.clip((number - rising) / max(settings.steps - rising, 1), 0.0, 1.0)
    last = settings.final_ratio
    falling = last + (1 - last) * (1 + jnp.cos(jnp.pi * way)) / 2
    return jnp.where(number < rising, (number + 1) / rising, falling)


def _in_fp32(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
