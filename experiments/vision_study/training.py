"""One run: trains an arm from a seed, and asks it about scenes that it has not seen."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import jax
import numpy as np
from flax import nnx

from coat_jax import generation
from coat_jax.models import vision_language as vl
from coat_jax.tokenizers import Bytes
from coat_jax.training.cluster.mesh import make_mesh, place
from coat_jax.training.config import EvaluationConfig, MeshConfig, OptimizerConfig, TrainConfig
from coat_jax.training.data import PicturesConfig
from coat_jax.training.data.picture_rows import row_of_questions
from coat_jax.training.setup import prepare
from coat_jax.training.step import held_out_step
from experiments import row_files
from experiments.loss_study.training import mean_loss, perturbed
from experiments.row_files import Row, rounded
from experiments.study.study import Job, Stopped
from experiments.study.worker import say
from experiments.vision_study.arms import ARMS, SIZES, Arm, Settings, Size
from experiments.vision_study.icons import KINDS, SPLITS, Scene, Split, draw, scene_of

HELD_OUT: tuple[Split, ...] = SPLITS[1:]
TEMPLATE = "{role}: {content}{end}"
LONG, SHORT = KINDS[:1], KINDS[1:]  # kinds of questions, by their answers
MOST_TOKENS = {SHORT: 24, LONG: 160}  # of an answer
REPORT_EVERY = 25  # steps
DRAWING = 3  # processes; threads would take turns with the one that trains


def measure(job: Job) -> list[Row]:
    """Makes a run; see `Study`."""
    (row,) = job.rows
    arm, size, settings = ARMS[row["arm"]], SIZES[row["size"]], Settings(**row["settings"])
    config, seed, begin = config_of(arm, size, settings, row["seed"]), row["seed"], time.monotonic()
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    numbers = np.random.default_rng(seed).permutation(settings.steps * settings.batch)
    with jax.set_mesh(mesh), ProcessPoolExecutor(DRAWING, get_context("spawn")) as pool:
        run = prepare(config, mesh)
        state = run.new_state()
        if arm.perturbed:
            state = state._replace(params=perturbed(state.params, seed))
        program = run.lower().compile()
        reports = []
        parts = (numbers[step :: settings.steps].tolist() for step in range(settings.steps))
        for step, batch in enumerate(ahead(pool, partial(batch_of, config, "train"), parts)):
            if job.asked:
                raise Stopped
            state, report = program(state, place(batch, mesh, microbatches=1))
            reports.append(report.loss)
            if step % REPORT_EVERY == 0:
                say(job, f"{step}/{settings.steps} {float(report.loss):.3f}")
        losses = [rounded(float(loss)) for loss in reports]
        trained = time.monotonic() - begin
        model, scenes = nnx.merge(run.graph, state.params), range(settings.held_out)
        loss = jax.jit(partial(held_out_step, run.graph, state.params))
        held_out, answers = {}, {}
        for split in HELD_OUT:
            parts = (scenes[i : i + settings.batch] for i in scenes[:: settings.batch])
            batches = (place(batch_of(config, split, part), mesh, microbatches=1) for part in parts)
            held_out[split] = [mean_loss(loss(batch)) for batch in batches]
            answers[split] = right_answers(config, model, [scene_of(split, n) for n in scenes])
    measured = {"losses": losses, "held_out": held_out, "right": answers}
    seconds = {"train": round(trained, 1), "all": round(time.monotonic() - begin, 1)}
    return [row | measured | {"seconds": seconds, "parents": row_files.parents()}]


def ahead(pool: Executor, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """`map`, a few items ahead of what is asked for."""
    waiting: deque[Any] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > 2 * DRAWING:
            yield waiting.popleft().result()
    yield from (one.result() for one in waiting)


def config_of(arm: Arm, size: Size, settings: Settings, seed: int) -> TrainConfig:
    """The trainer's config of a run."""
    return TrainConfig(
        model=dataclasses.replace(
            size.model, precision=arm.precision, tower_precision=arm.tower_precision
        ),
        data=PicturesConfig(template=TEMPLATE),
        optimizer=OptimizerConfig(
            name="adamw", learning_rate=settings.learning_rate, warmup_steps=0.08, b2=0.95
        ),
        evaluation=EvaluationConfig(every=0),
        total_steps=settings.steps,
        global_batch_size=settings.batch,
        sequence_length=settings.sequence,
        seed=seed,
    )


def batch_of(config: TrainConfig, split: Split, numbers: Sequence[int]) -> vl.Batch:
    """Scenes as a batch, each with its questions in turn."""
    rows = [row_of(config, scene_of(split, number)) for number in numbers]
    batch: vl.Batch = jax.tree.map(lambda *of_rows: np.stack(of_rows), *rows)
    return batch


def row_of(config: TrainConfig, scene: Scene) -> vl.Batch:
    """A scene as a row."""
    picture = [config.model.image_token] * config.model.features
    how = Bytes(), TEMPLATE, picture, config.sequence_length
    return row_of_questions(draw(scene), scene.questions.values(), *how)


def right_answers(config: TrainConfig, model: Any, scenes: Sequence[Scene]) -> dict[str, str]:
    """For each kind of question a 1 for each scene that is answered exactly, else a 0."""
    head = Bytes().encode("user: ") + [config.model.image_token] * config.model.features
    pictures, found = [[draw(scene)] for scene in scenes], {}
    for kinds in (SHORT, LONG):  # together, as each number of prompts is a program to compile
        pairs = [scene.questions[kind] for kind in kinds for scene in scenes]
        asked = [Bytes().encode(question) for question, _ in pairs]
        answers = generation.generate(
            model,
            [[*head, *one, 0, *Bytes().encode("assistant: ")] for one in asked],
            max_tokens=MOST_TOKENS[kinds],
            sampling=generation.Sampling(temperature=0),
            stops=[0],
            images=pictures * len(kinds),
        )
        wanted = [Bytes().encode(answer) for _, answer in pairs]
        right = "".join(str(int(a == w)) for a, w in zip(answers, wanted, strict=True))
        found |= {kind: right[i * len(scenes) :][: len(scenes)] for i, kind in enumerate(kinds)}
    return found
