"""One tiny video transformer, trained in BF16 and in FP8 with sparse attention: moving shapes.

    BF16     BF16 layers, dense attention, AdamW with FP32 moments
    FP8      FP8 layers and saved activations; attention in FP8, and to half of the tiles while a
             video is mostly noise; AdamW with 8-bit moments

Both start from the same parameters and see the same videos, times and noise. A video shows one
shape of one color that moves in one direction, which its text names. Reported is the held-out loss
by time (1 is noise), and drawn is what both make of the same texts and noise.
"""

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from coat_jax.models.video import Config, TiledAttention, VideoTransformer, sample
from coat_jax.training.checkpoint import weights
from coat_jax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    TrainConfig,
)
from coat_jax.training.data import VideosConfig
from coat_jax.training.loop import train
from experiments import records
from experiments.command import ROOT, parser_of

FRAMES, SIDE = 8, 16
SHAPES = ("square", "disk", "cross", "ring")
COLORS = {
    "red": (1, -0.7, -0.7), "green": (-0.7, 0.9, -0.7), "blue": (-0.6, -0.3, 1),
    "yellow": (1, 0.9, -0.8), "white": (1, 1, 1), "pink": (1, -0.2, 0.7),
}  # fmt: skip
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
WORDS = (*SHAPES, *COLORS, *DIRECTIONS)
TEXT = 3  # words
HELD_OUT = 64  # videos
TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)
SHOWN, SAMPLING_STEPS = 6, 24

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
HALF = TiledAttention(tile=(4, 4, 4), windows=(None, (1, 2, 2)), until=(0.5,))
WAYS: dict[str, tuple[Config, str]] = {
    "BF16": (dataclasses.replace(MODEL, precision="bf16"), "adamw"),
    "FP8": (dataclasses.replace(MODEL, attention=HALF), "fp8_adamw"),
}


def main() -> None:
    """Draws, trains, reports, samples."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of training (default: 400)")
    parser.add_argument("--videos", type=int, default=4096, help="to train on (default: 4096)")
    options = parser.parse_args()
    console, folder = Console(), ROOT / "out" / "video_demo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, numbers in (
        ("train", range(options.videos)),
        ("held_out", range(options.videos, options.videos + HELD_OUT)),
    ):
        latents, text = zip(*map(video, numbers), strict=True)
        save_file(
            {"latents": np.stack(latents), "text": np.stack(text)}, folder / f"{name}.safetensors"
        )
    models: dict[str, VideoTransformer] = {}
    for name, (model, optimizer) in WAYS.items():
        console.rule(name)
        train(config_of(model, optimizer, options.steps, folder, name), console)
        models[name] = weights.load(folder / name)
    console.rule("Results")
    held_out = [video(number) for number in range(options.videos, options.videos + HELD_OUT)]
    losses = {name: by_time(model, held_out) for name, model in models.items()}
    console.print(table(losses))
    records.write(options.out / "video_demo.json", {"times": TIMES, "losses": losses})
    paint(options.out, held_out[:SHOWN], models)
    console.print(f"Texts as videos: {options.out / 'video_demo.png'}, and moving: video_demo.gif")


def video(number: int) -> tuple[Float[np.ndarray, "8 16 16 3"], Float[np.ndarray, "3 14"]]:
    """A video, from -1 to 1, and its text, a vector for each word."""
    random = np.random.default_rng(number)
    words = [str(random.choice(group)) for group in (SHAPES, [*COLORS], [*DIRECTIONS])]
    shape, color, direction = words
    start, size = random.uniform(0, SIDE, 2), random.uniform(3, 4.5)
    frames = np.full((FRAMES, SIDE, SIDE, 3), -1, np.float32)
    for number_of_frame in range(FRAMES):
        center = start + number_of_frame * 1.5 * np.array(DIRECTIONS[direction])
        # A shape that leaves comes back on the other side.
        rows, columns = ((np.arange(SIDE) - at + SIDE / 2) % SIDE - SIDE / 2 for at in center)
        ink = inside(shape, rows[:, None], columns[None, :], size)
        frames[number_of_frame] += ink[..., None] * (np.float32(COLORS[color]) + 1)
    text = np.eye(len(WORDS), dtype=np.float32)[[WORDS.index(word) for word in words]]
    return frames, 3 * text


def inside(shape: str, row: np.ndarray, column: np.ndarray, size: float) -> np.ndarray:
    """How much of each pixel the shape covers."""
    far, near = np.maximum(abs(row), abs(column)), np.minimum(abs(row), abs(column))
    around = np.hypot(row, column)
    edge = {
        "square": size - far,
        "disk": size - around,
        "cross": np.minimum(size - far, size / 3 - near),
        "ring": np.minimum(size - around, around - size / 2),
    }[shape]
    return np.clip(edge + 0.5, 0, 1)


def config_of(model: Config, optimizer: str, steps: int, folder: Path, name: str) -> TrainConfig:
    """The trainer's config of a way."""
    return TrainConfig(
        model=model,
        data=VideosConfig(
            train=(str(folder / "train.safetensors"),),
            held_out=(str(folder / "held_out.safetensors"),),
            text_tokens=TEXT,
        ),
        optimizer=OptimizerConfig(name=optimizer, learning_rate=2e-3, warmup_steps=0.1, b2=0.95),
        evaluation=EvaluationConfig(every=max(steps // 4, 1)),
        checkpoint=CheckpointConfig(every=steps),
        total_steps=steps,
        global_batch_size=8,
        sequence_length=int(np.prod(model.grid)),
        out=str(folder / name),
    )


def by_time(model: VideoTransformer, videos: list[Any]) -> list[float]:
    """The squared error of held-out velocities at each of TIMES."""
    latents, text = (jnp.asarray(np.stack(each)) for each in zip(*videos, strict=True))
    noise = jax.random.normal(jax.random.key(0), latents.shape)

    @nnx.jit
    def error(model: VideoTransformer, time: Any) -> Any:
        noisy = (1 - time) * latents + time * noise
        found = model(noisy, text, jnp.full(len(latents), time))
        return jnp.mean(jnp.square(found - (noise - latents)))

    return [float(error(model, jnp.float32(time))) for time in TIMES]


def table(losses: dict[str, list[float]]) -> Table:
    """The losses as a table for the terminal."""
    shown = Table(title="Held-out loss by time: 0 is a video, 1 is noise")
    for column in ("time", *losses, "difference"):
        shown.add_column(column, justify="right")
    for time, bf16, fp8 in zip(TIMES, *losses.values(), strict=True):
        shown.add_row(f"{time}", f"{bf16:.4f}", f"{fp8:.4f}", f"{100 * (fp8 / bf16 - 1):+.1f} %")
    return shown


def paint(out: Path, videos: list[Any], models: dict[str, VideoTransformer]) -> None:
    """Draws some texts as videos: a frame beside the other, and as one moving picture."""
    from PIL import Image

    real, text = (np.stack(each) for each in zip(*videos, strict=True))
    rows = [real]
    for model in models.values():
        draw = nnx.jit(functools.partial(sample, steps=SAMPLING_STEPS))
        rows.append(np.asarray(draw(model, jnp.asarray(text), jax.random.key(1))))
    # [way, video, frame, height, width, 3], enlarged, with a gap around each.
    pictures = np.uint8(np.clip((np.stack(rows) + 1) * 127.5, 0, 255))
    pictures = np.pad(pictures.repeat(4, 3).repeat(4, 4), [(0, 0)] * 3 + [(2, 2)] * 2 + [(0, 0)])
    ways, shown, frames, height, width, _ = pictures.shape
    some = pictures[:, :, :: frames // 4]
    sheet = some.transpose(1, 0, 3, 2, 4, 5).reshape(shown * ways * height, -1, 3)
    Image.fromarray(sheet).save(out / "video_demo.png")
    moving = pictures.transpose(2, 0, 3, 1, 4, 5).reshape(frames, ways * height, shown * width, 3)
    first, *rest = map(Image.fromarray, moving)
    first.save(out / "video_demo.gif", save_all=True, append_images=rest, duration=120, loop=0)


if __name__ == "__main__":
    main()
