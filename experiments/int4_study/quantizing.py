"""One run: trains a network, quantizes it in every way, and measures its held-out loss."""

from collections.abc import Callable
from functools import partial
from typing import Any

from coat_jax.models import Llama
from coat_jax.nn.modular import Dense
from coat_jax.quantization import Recipe, balance, calibrate, quantize
from coat_jax.quantization.projections import replace_projections, unstack
from experiments.after_training.network import Network
from experiments.int4_study import fireq
from experiments.int4_study.caches import round_caches
from experiments.int4_study.ways import CALIBRATION, WAYS, Way
from experiments.loss_study import text as texts
from experiments.loss_study.rows import row_order
from experiments.loss_study.training import told_by, train
from experiments.row_files import Row
from experiments.study.study import Job
from experiments.study.worker import each


def measure(job: Job) -> list[Row]:
    """Makes a run; see `Study`."""
    told = told_by(job)
    tokens = texts.load(told.text, "train", told.size.model.vocab)
    order = row_order(tokens, told.settings, told.seed)
    trained = train(job, keep=True)
    network = Network(trained, tokens, order[:CALIBRATION])
    parts: dict[str, Callable[[], Any]] = {
        name: partial(losses_of, network, way) for name, way in WAYS.items()
    }
    return [job.rows[0] | trained.row() | {"quantized": each(job, parts)}]


def losses_of(network: Network, way: Way) -> list[float]:
    """The held-out loss of each batch, by a way."""
    model = _quantize(_fold(network, way), network, way)
    if way.cache is not None:
        round_caches(model, way.cache)
    return network.losses(model)


def _fold(network: Network, way: Way) -> Llama:
    if way.fold is None:
        return network.model
    fold = balance if way.fold == "balanced" else fireq.fold_keys
    return fold(network.model, network.calibration_batches())


def _quantize(model: Llama, network: Network, way: Way) -> Llama:
    if way.weights is None:
        # Modules, as in all other ways, so that nothing but rounding differs.
        return replace_projections(unstack(model), lambda path, *params: Dense(*params))
    if way.weights == "fireq":
        return fireq.quantize(model)
    if way.weights == "compensated":
        recipe = Recipe(format="int4")
        return quantize(model, recipe, calibrate(model, network.calibration_batches(), recipe))
    return quantize(model, Recipe(format=way.weights, activations=way.activations))
