"""How long a video transformer of 1.3B parameters takes to train, and to make a video.

Claim: FP8 with sparse attention needs less than half the time of BF16 with dense attention.

    python -m experiments.video_speed                    on a GPU
    python -m experiments.video_speed --only 480p
    python -m experiments.video_speed --small            tiny sizes, to try this script

    480p, 720p    Wan 2.1's smaller model, and one video of 81 frames: 32,760 and 75,600 tokens

A step of training is the trainer's: forward, backward and AdamW, its moments in 8 bits for COAT, in
FP32 for BF16. Parameters are in BF16. Where a step does not fit into the memory, it recomputes each
layer, and the results say so. A step of sampling computes the model once; a video takes 50. Sparse
attention sees a fifth of the tiles. diffusers samples with the same sizes in BF16, its layers
compiled by torch, in a process of its own.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from experiments.command import parser_of
from experiments.tile_attention_speed import window_of
from experiments.workers import reason, run_worker

LATENTS = {"480p": (21, 60, 104), "720p": (21, 90, 160)}
SMALL = (4, 16, 16)
DENSITY = 0.2
TEXT = 512  # tokens
SAMPLING_STEPS = 3
LIMIT = 240.0  # seconds for diffusers
WAYS = {
    "BF16, dense": ("bf16", False, "adamw"),
    "COAT, dense": ("coat", False, "fp8_adamw"),
    "COAT, FP8 and sparse attention": ("coat", True, "fp8_adamw"),
}
THEIRS = "diffusers, BF16, dense, compiled"

Case = dict[str, Any]


def main() -> None:
    """Measures each size in each way, and writes the results after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=LATENTS, help="one of the sizes")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try this script")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(in_torch(**options.worker)))
        return
    from experiments import records

    names = [options.only] if options.only else list(LATENTS)
    sizes = [{"name": name, "small": options.small} for name in names]
    # JAX takes most of the GPU's memory and keeps it.
    before_jax = [
        run_worker("experiments.video_speed", f"--worker={json.dumps(size)}", limit=LIMIT)
        for size in sizes
    ]
    for name, size, theirs in zip(names, sizes, before_jax, strict=True):
        if theirs.code:
            print(f"{name}: diffusers was not measured: {reason(theirs.stderr)}", flush=True)
        cases: list[Case] = []
        for case in [*theirs.results, *in_jax(**size)]:
            cases.append(case)
            print(f"{name} {case}", flush=True)
            records.write(options.out / f"video_speed_{name}.json", {"cases": cases})


def model_of(name: str, small: bool) -> Any:
    """The config of the model."""
    from coat_jax.models import video

    config = dataclasses.replace(video.config_of("wan2.1_1.3b"), latents=LATENTS[name])
    if not small:
        return config
    return dataclasses.replace(config, latents=SMALL, heads=1, layers=2, ffn=256, text_width=64)


def in_jax(name: str, small: bool) -> Iterator[Case]:
    """A case for each way."""
    import jax
    import jax.numpy as jnp

    from coat_jax import ops
    from coat_jax.models.video import TiledAttention
    from coat_jax.training.cluster.mesh import make_mesh
    from coat_jax.training.config import MeshConfig

    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 1 << 60)
    for way, (precision, is_sparse, optimizer) in WAYS.items():
        config = model_of(name, small)
        attention = None
        if is_sparse:
            tiles = ops.Tiles.best(config.grid, 64 if small else 256)
            attention = TiledAttention(tiles.tile, (window_of(tiles, DENSITY),))
        config = dataclasses.replace(
            config, precision=precision, attention=attention, param_dtype=jnp.bfloat16
        )
        with jax.set_mesh(mesh):
            for remat in (None, "layer"):
                changed = dataclasses.replace(config, remat=remat)
                run, program = training_program(changed, optimizer, mesh)
                peak = peak_of(program)
                if peak < memory:
                    break
            step_ms, model = train(run, program, small)
            del program
            sample_ms = sampling_ms(model, config, small)
            del model, run
        yield {
            "way": way, "train_ms": step_ms, "peak": peak, "recomputes": remat is not None,
            "sampling_step_ms": sample_ms,
        }  # fmt: skip


def training_program(model: Any, optimizer: str, mesh: Any) -> Any:
    """The step of the trainer, compiled."""
    from coat_jax.training.config import OptimizerConfig, TrainConfig
    from coat_jax.training.data import VideosConfig
    from coat_jax.training.setup import prepare

    tokens = functools.reduce(lambda a, b: a * b, model.grid)
    config = TrainConfig(
        model=model,
        data=VideosConfig(text_tokens=TEXT),
        optimizer=OptimizerConfig(name=optimizer, learning_rate=1e-5),
        total_steps=10,
        global_batch_size=1,
        sequence_length=tokens,
    )
    run = prepare(config, mesh)
    return run, run.lower().compile()


def peak_of(program: Any) -> int:
    """The memory of a program, by XLA's account."""
    memory = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return int(held + memory.output_size_in_bytes - memory.alias_size_in_bytes)


def train(run: Any, program: Any, small: bool) -> tuple[float, Any]:
    """The time of a step, and the model."""
    import jax
    import numpy as np
    from flax import nnx

    random, state = np.random.default_rng(0), run.new_state()
    batch = jax.tree.map(
        lambda s: jax.device_put(random.standard_normal(s.shape).astype(s.dtype), s.sharding),
        run.batch,
    )
    batch = batch._replace(
        seed=jax.device_put(np.ones(batch.seed.shape, np.uint32), batch.seed.sharding),
        counts=jax.device_put(np.ones(batch.counts.shape, bool), batch.counts.sharding),
    )

    def step() -> None:
        nonlocal state
        state, report = program(state, batch)
        jax.block_until_ready(report)

    return median_ms(step, small), nnx.merge(run.graph, state.params)


def sampling_ms(model: Any, config: Any, small: bool) -> float:
    """The time of a step of sampling."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from coat_jax.models.video import sample

    text = jnp.ones((1, TEXT, config.text_width), jnp.bfloat16)
    make = nnx.jit(functools.partial(sample, steps=SAMPLING_STEPS))

    def call() -> None:
        jax.block_until_ready(make(model, text, jax.random.key(0)))

    return median_ms(call, small) / SAMPLING_STEPS


def in_torch(name: str, small: bool) -> Case:
    """A step of diffusers' model."""
    import diffusers
    import torch

    from coat_jax.models.video.hf import to_json

    config, device = model_of(name, small), "cuda" if torch.cuda.is_available() else "cpu"
    data = to_json(config, "bfloat16")
    with torch.device(device):
        model = diffusers.WanTransformer3DModel(**{k: v for k, v in data.items() if k[0] != "_"})
        model = model.to(torch.bfloat16).eval()
        f, h, w = config.latents
        latents = torch.randn(1, config.channels, f, h, w, dtype=torch.bfloat16)
        text = torch.randn(1, TEXT, config.text_width, dtype=torch.bfloat16)
        noise_time = torch.tensor([500])
    if not small:
        for block in model.blocks:  # torch compiles layers that are alike once
            block.compile()

    @torch.no_grad()
    def call() -> None:
        model(hidden_states=latents, timestep=noise_time, encoder_hidden_states=text)
        if device == "cuda":
            torch.cuda.synchronize()

    return {"way": THEIRS, "sampling_step_ms": median_ms(call, small)}


def median_ms(call: Callable[[], None], small: bool) -> float:
    """The time of a call; the first ones compile, and let clocks settle."""
    seconds = []
    for _ in range(2 if small else 8):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(seconds[len(seconds) // 2 :])


if __name__ == "__main__":
    main()
