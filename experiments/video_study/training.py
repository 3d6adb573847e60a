"""One run: trains an arm from a seed, evaluates it by time, and lets it make videos."""

import base64
import io
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from coat_jax.models.video import Batch, VideoTransformer, sample
from coat_jax.training.cluster.mesh import make_mesh, place
from coat_jax.training.config import EvaluationConfig, MeshConfig, OptimizerConfig, TrainConfig
from coat_jax.training.data import VideosConfig
from coat_jax.training.setup import prepare
from experiments import row_files
from experiments.drawn_videos import (
    Video,
    contact_sheet,
    losses_by_time,
    stacked,
    to_pixels,
    video,
)
from experiments.loss_study.training import perturbed
from experiments.row_files import Row, rounded
from experiments.study.study import Job
from experiments.study.worker import say
from experiments.video_study.arms import AFTERWARDS, ARMS, SHAPES, SIZES, Arm, Settings, Size

REPORT_EVERY = 25  # steps
HELD_OUT = 1_000_000_000  # the first number of a held-out video
SAMPLES, SAMPLING_STEPS = 3, 50
WITH_SAMPLES = 0  # the seed whose networks make videos


def measure(job: Job) -> list[Row]:
    """Makes a run; see `Study`."""
    (row,) = job.rows
    arm, size, settings = ARMS[row["arm"]], SIZES[row["size"]], Settings(**row["settings"])
    seed, begin = row["seed"], time.monotonic()
    config, mesh = config_of(arm, size, settings, seed), make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        run = prepare(config, mesh)
        state = run.new_state()
        if arm.perturbed:
            state = state._replace(params=perturbed(state.params, seed))
        program, reports = run.lower().compile(), []
        for step in range(settings.steps):
            job.stop_if_asked()
            first = (seed * settings.steps + step) * settings.batch
            numbers = range(first, first + settings.batch)
            batch = place(batch_of(size, numbers), mesh, microbatches=1)
            state, report = program(state, batch)
            reports.append(report.loss)
            if step % REPORT_EVERY == 0:
                say(job, f"{step}/{settings.steps} {float(report.loss):.3f}")
        losses = [rounded(float(loss)) for loss in reports]
        trained = time.monotonic() - begin
        videos = [drawn(size, HELD_OUT + number) for number in range(settings.held_out)]
        ways = {"own": arm} | (AFTERWARDS if arm.attention is None else {})
        held_out, samples = {}, {}
        for name, way in ways.items():
            graph = prepare(config_of(way, size, settings, seed), mesh).graph
            model = nnx.merge(graph, state.params)
            held_out[name] = losses_by_time(model, videos, settings.batch)
            if seed == WITH_SAMPLES:
                samples[name] = sheet_of(model, videos[:SAMPLES])
    measured = {"losses": losses, "held_out": held_out, "samples": samples}
    seconds = {"train": round(trained, 1), "all": round(time.monotonic() - begin, 1)}
    return [row | measured | {"seconds": seconds, "parents": row_files.parents()}]


def config_of(arm: Arm, size: Size, settings: Settings, seed: int) -> TrainConfig:
    """The trainer's config of a run."""
    model = size.model_of(arm)
    return TrainConfig(
        model=model,
        data=VideosConfig(text_tokens=SHAPES),
        optimizer=OptimizerConfig(
            name="adamw", learning_rate=settings.learning_rate, warmup_steps=0.05, b2=0.95
        ),
        evaluation=EvaluationConfig(every=0),
        total_steps=settings.steps,
        global_batch_size=settings.batch,
        sequence_length=int(np.prod(model.grid)),
        seed=seed,
    )


def drawn(size: Size, number: int) -> Video:
    """The video with this number."""
    frames, side, _ = size.model.latents
    return video(number, frames, side, SHAPES)


def batch_of(size: Size, numbers: range) -> Batch:
    """Videos as a batch; a number is also the seed of time and noise."""
    latents, text = stacked(drawn(size, number) for number in numbers)
    seeds = np.array(numbers, np.uint32)
    return Batch(latents, text.astype(jnp.bfloat16), seeds, np.ones(len(seeds), bool))


def sheet_of(model: VideoTransformer, videos: list[Video]) -> str:
    """Frames of the videos that a model makes of some texts, as a PNG in base64."""
    from PIL import Image

    _, text = stacked(videos)
    make: Any = nnx.jit(partial(sample, steps=SAMPLING_STEPS))
    pixels = to_pixels(make(model, text, jax.random.key(1)), gap=1)[None]
    file = io.BytesIO()
    Image.fromarray(contact_sheet(pixels)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
