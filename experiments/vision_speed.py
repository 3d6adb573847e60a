"""How fast vision-language models train, and in how much memory, by the parts that are in FP8.

Claim: FP8 in tower and decoder takes less memory than in the decoder alone, and no more time.

    python -m experiments.vision_speed                     on a GPU: all models, all ways
    python -m experiments.vision_speed --only smolvlm_256m --batch 64
    python -m experiments.vision_speed --small             tiny sizes, to try this script

    smolvlm_256m    SmolVLM-256M: SigLIP-B with pictures of 512 x 512, SmolLM2-135M
    so400m          LLaVA with SigLIP so400m and pictures of 378 x 378, and Llama 3.2 1B

A step is the trainer's: forward, backward and AdamW, its moments in 8 bits, for BF16 in FP32.
Parameters are in BF16, and layers are scanned; each row has one picture and 64 tokens of text.
transformers runs in a process of its own, in BF16, each kind of layer compiled by torch, with
torch's fused AdamW and its moments in BF16; where it is not installed, a line says so. "Peak" is
that of the step, by XLA's account and by torch's allocator; "saved" what the backward pass needs
besides parameters, counted.
"""

import argparse
import dataclasses
import json
import time
from typing import Any

from coat_jax.precision import Precision
from experiments.command import parser_of
from experiments.workers import reason, run_worker

TEXT = 64  # tokens of a row
LIMIT = 200.0  # seconds for transformers
BATCHES = {"smolvlm_256m": 64, "so400m": 16}
SAVED = Precision(fp8_linear=False)
# The precision of the whole, of the tower, and the optimizer.
WAYS: dict[str, tuple[str, Precision | str | None, str]] = {
    "BF16": ("bf16", None, "adamw"),
    "FP8 in the decoder alone": ("fp8_linear", "bf16", "fp8_adamw"),
    "COAT": ("coat", None, "fp8_adamw"),
    "COAT_INT8": ("coat_int8", None, "fp8_adamw"),
    "COAT, the tower's products in BF16": ("coat", SAVED, "fp8_adamw"),
    "COAT_LEAN": ("coat_lean", None, "fp8_adamw"),
}
THEIRS = "transformers, BF16, compiled"

Case = dict[str, Any]


def main() -> None:
    """Measures each model in each way, and writes the results after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=BATCHES, help="one of the models")
    parser.add_argument("--batch", type=int, help="rows of a step (default: by model)")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try this script")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(in_torch(**options.worker)))
        return
    from experiments import records

    names = [options.only] if options.only else list(BATCHES)
    sizes = [
        {"name": name, "batch": options.batch or BATCHES[name], "small": options.small}
        for name in names
    ]
    # JAX takes most of the GPU's memory and keeps it.
    before_jax = [
        run_worker("experiments.vision_speed", f"--worker={json.dumps(size)}", limit=LIMIT)
        for size in sizes
    ]
    for name, size, theirs in zip(names, sizes, before_jax, strict=True):
        if theirs.code:
            print(f"{name}: transformers was not measured: {reason(theirs.stderr)}", flush=True)
        cases: list[Case] = []
        for case in [*theirs.results, *in_jax(**size)]:
            cases.append(case)
            words = f"{case['ms']:8.1f} ms  {case['images_per_second']:8.1f} images/s"
            print(f"{name:14} {case['way']:30} {words}  {case['peak'] / 1e9:6.2f} GB", flush=True)
            tokens = model_of(name, options.small).features + TEXT
            records.write(
                options.out / f"vision_speed_{name}.json", {"cases": cases, "tokens": tokens}
            )


def model_of(name: str, small: bool) -> Any:
    """The config of a model."""
    from coat_jax import models
    from coat_jax.models import vision_language as vl

    if name == "smolvlm_256m":
        config = vl.config_of(name)
    else:
        llama = dataclasses.replace(
            models.config_of("llama3_8b"), width=2048, layers=16, heads=32, head_dim=64, ffn=8192,
            tied=True,
        )  # fmt: skip
        images = vl.ImageFormat(size=378)
        tower = vl.TowerConfig(
            images=images, patch=14, width=1152, layers=26, heads=16, ffn=4304,
            unused=("layer", "last_norm"),
        )  # fmt: skip
        config = vl.Config(tower=tower, decoder=llama, projector="mlp", image_token=128255)
    if small:
        tower = dataclasses.replace(config.tower, layers=1)
        decoder = dataclasses.replace(config.decoder, layers=1, vocab=512)
        config = dataclasses.replace(config, tower=tower, decoder=decoder, image_token=511)
    return config


def in_jax(name: str, batch: int, small: bool) -> Any:
    """A case for each way."""
    import jax
    import jax.numpy as jnp

    from coat_jax.training.cluster.mesh import make_mesh
    from coat_jax.training.config import MeshConfig, OptimizerConfig, TrainConfig
    from coat_jax.training.data import PicturesConfig
    from coat_jax.training.report.accounting import saved_activations
    from coat_jax.training.setup import prepare

    rows = 2 if small else batch
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    for way, (precision, tower, optimizer) in WAYS.items():
        model = dataclasses.replace(
            model_of(name, small), precision=precision, tower_precision=tower,
            param_dtype=jnp.bfloat16, scan=True,
        )  # fmt: skip
        config = TrainConfig(
            model=model,
            data=PicturesConfig(train=("none.jsonl",)),
            optimizer=OptimizerConfig(name=optimizer, learning_rate=1e-5),
            total_steps=10,
            global_batch_size=rows,
            sequence_length=model.features + TEXT,
        )
        with jax.set_mesh(mesh):
            run = prepare(config, mesh)
            print(f"{name:14} {way:30} compiles", flush=True)
            program = run.lower().compile()
            state, inputs = run.new_state(), example(config, run.batch)
            memory = program.memory_analysis()
            peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
            seconds = []
            for _ in range(2 if small else 12):
                begin = time.perf_counter()
                state, report = program(state, inputs)
                jax.block_until_ready(report)
                seconds.append(time.perf_counter() - begin)
            del state, program
        saved = saved_activations(config, rows)
        yield _case(way, rows, seconds, peak) | {"saved": saved}


def example(config: Any, shapes: Any) -> Any:
    """A batch with one picture at the beginning of each row."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    random = np.random.default_rng(0)
    batch = jax.tree.map(
        lambda s: jax.device_put(random.integers(0, 255, s.shape).astype(s.dtype), s.sharding),
        shapes,
    )
    picture = jnp.arange(config.sequence_length) < config.model.features
    tokens = jnp.where(picture, config.model.image_token, batch.tokens)
    labels = jnp.where(picture, -100, batch.labels)
    ones, places = jnp.ones_like(tokens), jnp.arange(config.sequence_length, dtype=jnp.int32)
    placed = batch._replace(
        tokens=tokens, labels=labels, positions=places + 0 * ones, segments=ones
    )
    return jax.tree.map(lambda a, s: jax.device_put(a, s.sharding), placed, shapes)


def in_torch(name: str, batch: int, small: bool) -> Case:
    """transformers' model of the same config, by a step of its own."""
    import tempfile
    from pathlib import Path

    import torch
    import transformers

    from coat_jax.models.vision_language.hf.config import to_json

    config, device = model_of(name, small), "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(to_json(config, "bfloat16")))
        theirs = transformers.AutoConfig.from_pretrained(folder)
    rows, length = 2 if small else batch, config.features + TEXT
    with torch.device(device):
        of_config = transformers.AutoModelForImageTextToText.from_config
        model = of_config(theirs, dtype=torch.bfloat16).train()
        tokens = torch.randint(0, 255, (rows, length))
        tokens[:, : config.features] = config.image_token
        labels = torch.where(tokens == config.image_token, -100, tokens)
        size = config.tower.images.size
        shape = (rows, 1, 3, size, size) if name == "smolvlm_256m" else (rows, 3, size, size)
        pixels = torch.randn(shape, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    if not small:
        # torch compiles layers that are alike once.
        for module in model.modules():
            for layer in module if isinstance(module, torch.nn.ModuleList) else ():
                layer.compile()
    seconds = []
    for _ in range(2 if small else 12):
        begin = time.perf_counter()
        model(input_ids=tokens, pixel_values=pixels, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return _case(THEIRS, rows, seconds, peak)


def _case(way: str, rows: int, seconds: list[float], peak: int) -> Case:
    """Half of the steps are not counted: programs are compiled and clocks settle."""
    import statistics

    of_step = statistics.median(seconds[len(seconds) // 2 :])
    times = {"ms": 1e3 * of_step, "images_per_second": rows / of_step}
    return {"way": way, "batch": rows, **times, "peak": peak}


if __name__ == "__main__":
    main()
