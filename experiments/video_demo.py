"""One tiny video transformer, trained in BF16 and in FP8 with sparse attention: moving shapes.

    BF16     BF16 layers, dense attention, Muon with an FP32 momentum
    FP8      FP8 layers and saved activations; attention in FP8, and to half of the tiles while a
             video is mostly noise; Muon with an 8-bit momentum

Both start from the same parameters and see the same videos, times and noise. A video shows one
shape of one color that moves in one direction, which its text names. Reported is the held-out loss
by time (1 is noise), and drawn are videos of some texts: drawn ones, and what both networks make of
the same noise. It takes 25 minutes on two idle processors.
"""

import dataclasses
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

import coat_jax as coat
from coat_jax.models.video import Config, TiledAttention, VideoTransformer, sample
from coat_jax.training.checkpoint import weights
from coat_jax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    TrainConfig,
)
from coat_jax.training.data import VideosConfig
from experiments import records
from experiments.command import ROOT, parser_of
from experiments.demo import train_whole
from experiments.drawn_videos import (
    TIMES,
    WORDS,
    Video,
    contact_sheet,
    frames_of_all,
    losses_by_time,
    stacked,
    to_pixels,
    video,
)

FRAMES, SIDE = 8, 16
HELD_OUT = 64  # videos
SAMPLING_STEPS = 24

MODEL = Config(
    latents=(FRAMES, SIDE, SIDE),
    channels=3,
    heads=2,
    head_dim=64,
    layers=4,
    ffn=384,
    text_width=len(WORDS),
    time_width=64,
    shift=1.0,
)
# 4 x 2 x 1 tiles of as many tokens as the kernels take at least.
HALF = TiledAttention(tile=(2, 4, 8), windows=(None, (2, 2, 1)), until=(0.5,))
MUON = {
    "consistent_rms": 0.2,
    "adam_b2": 0.95,
    "muon_weight_dimension_numbers": coat.optax.hidden_matrices,
}
WAYS: dict[str, tuple[Config, Any]] = {
    "BF16": (dataclasses.replace(MODEL, precision="bf16"), partial(optax.contrib.muon, **MUON)),
    "FP8": (dataclasses.replace(MODEL, attention=HALF), partial(coat.optax.fp8_muon, **MUON)),
}


def main() -> None:
    """Draws, trains, reports, samples."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=3000, help="of training (default: 3000)")
    parser.add_argument("--videos", type=int, default=4096, help="to train on (default: 4096)")
    options = parser.parse_args()
    console, folder = Console(), ROOT / "out" / "video_demo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, numbers in (
        ("train", range(options.videos)),
        ("held_out", range(options.videos, options.videos + HELD_OUT)),
    ):
        latents, text = stacked(map(drawn, numbers))
        save_file({"latents": latents, "text": text}, folder / f"{name}.safetensors")
    models: dict[str, VideoTransformer] = {}
    for name, (model, muon) in WAYS.items():
        console.rule(name)
        train_whole(config_of(model, muon, options.steps, folder, name), console)
        models[name] = weights.load(folder / name)
    console.rule("Results")
    held_out = [drawn(number) for number in range(options.videos, options.videos + HELD_OUT)]
    losses = {name: losses_by_time(model, held_out, HELD_OUT) for name, model in models.items()}
    console.print(table(losses))
    records.write(options.out / "video_demo.json", {"times": TIMES, "losses": losses})
    of_colors = {int(np.flatnonzero(text)[1]): (latents, text) for latents, text in held_out}
    paint(options.out, [*of_colors.values()], models)
    picture = options.out / "video_demo.png"
    console.print(f"Four frames of videos, drawn, BF16 and FP8: {picture}; moving: video_demo.gif")


def drawn(number: int) -> Video:
    """The video with this number."""
    return video(number, FRAMES, SIDE)


def config_of(model: Config, muon: Any, steps: int, folder: Path, name: str) -> TrainConfig:
    """The trainer's config of a way."""
    return TrainConfig(
        model=model,
        data=VideosConfig(
            train=(str(folder / "train.safetensors"),),
            held_out=(str(folder / "held_out.safetensors"),),
            text_tokens=1,
        ),
        optimizer=OptimizerConfig(transformation=muon, learning_rate=6e-3, warmup_steps=0.1),
        evaluation=EvaluationConfig(every=max(steps // 4, 1)),
        checkpoint=CheckpointConfig(every=steps),
        total_steps=steps,
        global_batch_size=2,
        sequence_length=int(np.prod(model.grid)),
        out=str(folder / name),
    )


def table(losses: dict[str, list[float]]) -> Table:
    """The losses as a table for the terminal."""
    shown = Table(title="Held-out loss by time: 0 is a video, 1 is noise")
    for column in ("time", *losses, "difference"):
        shown.add_column(column, justify="right")
    for time, bf16, fp8 in zip(TIMES, *losses.values(), strict=True):
        shown.add_row(f"{time}", f"{bf16:.4f}", f"{fp8:.4f}", f"{100 * (fp8 / bf16 - 1):+.1f} %")
    return shown


def paint(out: Path, videos: list[Any], models: dict[str, VideoTransformer]) -> None:
    """Draws a text of each color as videos: a frame beside the other, and as a moving picture."""
    from PIL import Image

    real, text = stacked(videos)
    rows = [real]
    for model in models.values():
        make = nnx.jit(partial(sample, steps=SAMPLING_STEPS))
        rows.append(np.asarray(make(model, jnp.asarray(text), jax.random.key(1))))
    pixels = to_pixels(np.stack(rows), enlarged=4, gap=2)
    Image.fromarray(contact_sheet(pixels)).save(out / "video_demo.png")
    first, *rest = map(Image.fromarray, frames_of_all(pixels))
    first.save(out / "video_demo.gif", save_all=True, append_images=rest, duration=120, loop=0)


if __name__ == "__main__":
    main()
