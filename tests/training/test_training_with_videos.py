"""Video transformers are trained by the loop that trains all others."""

import argparse
import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
import train_cases
from safetensors.numpy import save_file
from small_model import assert_same_model

from coat_jax.cli.model_folder import ModelFolder
from coat_jax.errors import UserError
from coat_jax.models.video import Config, TiledAttention, hf
from coat_jax.training.checkpoint import conversion, weights
from coat_jax.training.config import CheckpointConfig, EvaluationConfig, MeshConfig
from coat_jax.training.config_files import source
from coat_jax.training.data import VideosConfig, videos
from coat_jax.training.loop import train
from coat_jax.training.overrides import override

TILED = TiledAttention(tile=(1, 2, 2), windows=(None, (1, 1, 1)), until=(0.8,))
SIZES = {"heads": 2, "head_dim": 32, "layers": 2, "ffn": 64, "text_width": 16, "time_width": 32}
MODEL = Config(latents=(2, 4, 8), channels=3, attention=TILED, **SIZES)
STEPS = 4


def write(folder, **counts):
    """Files of random videos: so many in each."""
    random = np.random.default_rng(0)
    for name, count in counts.items():
        latents = random.normal(size=(count, *MODEL.latents, 3)).astype(np.float16)
        text = random.normal(size=(count, 5, 16)).astype(np.float32)
        save_file({"latents": latents, "text": text}, folder / f"{name}.safetensors")
    return f"{folder}/*.safetensors"


@pytest.fixture
def data(tmp_path):
    return VideosConfig(train=(write(tmp_path, a=5, b=3),), held_out_part=0.25, text_tokens=5)


def config_of(data, out, **changes):
    usual = {"model": MODEL, "data": data, "mesh": MeshConfig(data=-1, fsdp=1), "out": str(out)}
    sizes = {"total_steps": STEPS, "global_batch_size": 8, "sequence_length": 16}
    evaluation = {"evaluation": EvaluationConfig(every=2)}
    return replace(train_cases.SMALL, **usual | sizes | evaluation | changes)


def losses(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [found["loss"] for line in lines if "loss" in (found := json.loads(line))]


def test_shapes_and_times_are_set_on_the_command_line(data, tmp_path):
    line = "--model.latents 2 4 4 --sequence_length 8 --until 0.5 --tile none"
    model = override(config_of(data, tmp_path), line.split()).model
    attention = replace(TILED, until=(0.5,), tile=None)
    assert model == replace(MODEL, latents=(2, 4, 4), attention=attention)


@pytest.mark.costly
def test_a_run_that_is_resumed_repeats_the_one_that_was_not_and_becomes_a_folder(data, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    steady = replace(train_cases.SMALL.optimizer, schedule="constant")
    train(config_of(data, whole, optimizer=steady))
    text = (whole / "metrics.jsonl").read_text()
    assert "held_out_loss" in text
    assert "perplexity" not in text
    often = {"checkpoint": CheckpointConfig(every=2), "optimizer": steady}
    train(config_of(data, parts, **often, total_steps=2))
    train(config_of(data, parts, **often))
    assert len(losses(whole)) == STEPS
    assert losses(parts) == losses(whole)
    names = {}
    exec(source(config_of(data, whole, optimizer=steady)), names)
    assert names["config"]() == config_of(data, whole, optimizer=steady)
    conversion.convert(str(parts), str(tmp_path / "folder"))
    run = weights.load(parts)
    options = argparse.Namespace(where=parts, step=None, precision=None, tokenizer=None)
    with pytest.raises(UserError, match="of the family 'video', which neither reads nor writes"):
        ModelFolder(options)
    assert_same_model(hf.load(tmp_path / "folder", run.config), run)


def test_rows_are_videos_with_seeds_and_held_out_ones_are_apart(data):
    train_rows, held_out = (
        videos.rows_of(data, MODEL, split=split, sequence=16) for split in ("train", "held_out")
    )
    assert (len(train_rows), len(held_out)) == (6 * 1000, 2 * 4)
    first, again = train_rows[1], train_rows[7]
    np.testing.assert_array_equal(first.latents, again.latents)
    assert first.seed != again.seed
    known = {row.latents.tobytes() for row in map(train_rows.__getitem__, range(6))}
    assert len(known) == 6
    assert not known & {row.latents.tobytes() for row in map(held_out.__getitem__, range(2))}
    assert first.text.dtype == jnp.bfloat16
    assert not train_rows.has_labels(train_rows.padding)
    assert train_rows.digest != held_out.digest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_length": 8}, "sequence_length=8 must be 16: a video of the model's latents"),
        ({"train": ()}, r"data.train=\(\) names no videos"),
        ({"text_tokens": 7}, r"a.safetensors has text \[5, 5, 16\], and needs \[videos, 7, 16\]"),
        (
            {"latents": (2, 4, 4)},
            r"has latents \[5, 2, 4, 8, 3\], and needs \[videos, 2, 4, 4, 3\]",
        ),
        ({"held_out": "train"}, "is named in data.train and in data.held_out"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(change, message, data):
    sequence = change.pop("sequence_length", 16)
    model = MODEL
    if "latents" in change:
        model, sequence = replace(MODEL, latents=change.pop("latents"), attention=None), 8
    if change.get("held_out"):
        change = {"held_out": data.train}
    with pytest.raises(UserError, match=message) as raised:
        videos.rows_of(replace(data, **change), model, split="train", sequence=sequence)
    assert "\n" not in str(raised.value)


def test_a_file_without_videos_is_refused(tmp_path):
    save_file({"latents": np.zeros((2, 2, 4, 8, 3), np.float32)}, tmp_path / "a.safetensors")
    data = VideosConfig(train=(str(tmp_path / "a.safetensors"),), text_tokens=5)
    with pytest.raises(UserError, match=r"has text none, and needs \[videos, 5, 16\]"):
        videos.rows_of(data, MODEL, split="train", sequence=16)
