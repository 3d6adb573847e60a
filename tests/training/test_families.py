"""The loop trains a model that it has never seen: digits by an MLP, in a family of its own."""

import dataclasses
import json
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_cases import SMALL

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.models import Loss, ModelConfig
from coat_jax.training import families
from coat_jax.training.checkpoint import Checkpoints, conversion, weights
from coat_jax.training.config import MeshConfig, OptimizerConfig
from coat_jax.training.loop import train

PIXELS, CLASSES = 64, 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """An MLP; `noise` is added to the images in training."""

    width: int = 128
    noise: float = 0.3


@dataclasses.dataclass(frozen=True)
class Data:
    """How many images there are."""

    images: int = 256


class Batch(NamedTuple):
    """Images, their digits (-1 for padding), and seeds of noise."""

    images: jax.Array
    digits: jax.Array
    seeds: jax.Array


class Digits(nnx.Module):
    """Features, which the tests freeze, and a head."""

    def __init__(self, config, *, rngs):
        self.config = config
        self.features = coat.nn.Linear(PIXELS, config.width, precision=config.precision, rngs=rngs)
        self.head = coat.nn.Linear(config.width, CLASSES, precision=config.precision, rngs=rngs)
        self.counts = nnx.Variable(jnp.zeros(CLASSES))  # state without gradients

    def loss(self, batch, *, evaluate=False):
        """The cross-entropy of the digits, and how many are right."""
        x = batch.images
        if not evaluate:
            draw = lambda seed: jax.random.normal(jax.random.key(seed), (PIXELS,))  # noqa: E731
            x = x + self.config.noise * jax.vmap(draw)(batch.seeds)
        logits = self.head(nnx.relu(self.features(x))).astype(jnp.float32)
        counted = batch.digits >= 0
        digits = jnp.maximum(batch.digits, 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, digits)
        right = (jnp.argmax(logits, -1) == digits) & counted
        seen = jnp.sum(jax.nn.one_hot(digits, CLASSES) * counted[:, None], 0)
        sums = {"accuracy": jnp.sum(right.astype(jnp.float32)), "seen": seen}
        return Loss(jnp.sum(jnp.where(counted, losses, 0)), jnp.sum(counted), sums)

    def after_step(self, statistics):
        """Counts the digits that were learned from."""
        self.counts[...] += statistics["seen"]
        return {"classes": jnp.sum(statistics["seen"] > 0)}


class Rows:
    """Noisy copies of ten patterns."""

    end_of_text, padding = None, Batch(np.zeros(PIXELS, np.float32), np.int32(-1), np.uint32(0))

    def __init__(self, model, data, split, sequence, seed):
        self.description, self.digest = f"{data.images} digits", f"{data.images} {split}"
        patterns = np.random.default_rng(0).standard_normal((CLASSES, PIXELS))
        rng = np.random.default_rng(["train", "held_out"].index(split) + 1)
        self.digits = rng.integers(0, CLASSES, data.images).astype(np.int32)
        noise = rng.standard_normal((data.images, PIXELS))
        self.images = (patterns[self.digits] + 0.1 * noise).astype(np.float32)

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, row):
        return Batch(self.images[row], self.digits[row], np.uint32(row))

    def has_labels(self, row):
        """Whether a row counts."""
        return row.digits >= 0


def example(run):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), Rows.padding)


@pytest.fixture(autouse=True)
def family(monkeypatch):
    digits = families.Family(Digits, Config, Data, Rows, example)
    monkeypatch.setitem(families.FAMILIES, "digits", digits)


def config_of(folder, **changes):
    run = dataclasses.replace(
        SMALL,
        model=Config(),
        data=Data(),
        sequence_length=1,
        gradient_accumulation_steps=2,
        mesh=MeshConfig(data=-1, fsdp=1),
        frozen=("features.*",),
        evaluation=dataclasses.replace(SMALL.evaluation, every=10, batches=20),
        checkpoint=dataclasses.replace(SMALL.checkpoint, every=5, keep=9),
        optimizer=OptimizerConfig(learning_rate=0.03, schedule="constant", warmup_steps=0),
        total_steps=10,
        out=str(folder),
    )
    return dataclasses.replace(run, **changes)


def test_another_family_trains_resumes_and_is_evaluated_by_the_same_loop(tmp_path):
    outcome = train(config_of(tmp_path / "run"))
    records = records_of(tmp_path / "run")
    steps = [record for record in records if "loss" in record]
    assert 1 < steps[0]["classes"] <= CLASSES
    assert steps[-1]["accuracy"] > 2 * steps[0]["accuracy"]
    assert records[-1]["held_out_accuracy"] > 0.6
    assert outcome.held_out_loss == records[-1]["held_out_loss"]
    assert not {"seen", "mfu"} & steps[0].keys()

    first, last = (weights.load(tmp_path / "run", step=step) for step in (5, 10))
    assert isinstance(last, Digits)
    assert last.config == Config()
    assert np.array_equal(first.features.kernel[...], last.features.kernel[...])  # frozen
    assert not np.array_equal(first.head.kernel[...], last.head.kernel[...])
    assert last.counts[...].sum() == 10 * SMALL.global_batch_size  # by after_step

    with Checkpoints(tmp_path / "run/checkpoints") as checkpoints:
        assert checkpoints.steps() == [5, 10]
    shutil.rmtree(tmp_path / "run/checkpoints/10")
    train(config_of(tmp_path / "run"))
    again = [record["loss"] for record in records_of(tmp_path / "run") if "loss" in record]
    assert again == [record["loss"] for record in steps]

    with pytest.raises(UserError, match="no Hugging Face format for models of the family 'digits'"):
        conversion.convert(tmp_path / "run", tmp_path / "out")


def records_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"frozen": ("feature",)}, "frozen='feature' matches no parameter. They are named"),
        ({"frozen": ("*",)}, "leaves no parameter to train"),
        ({"data": SMALL.data}, "must be a Data"),
    ],
)
def test_what_does_not_fit_is_refused(changes, said, tmp_path):
    with pytest.raises(UserError, match=said.replace("*", r"\*")):
        train(config_of(tmp_path, **changes))
