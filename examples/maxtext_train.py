"""MaxText: its own training loop with `fp8_adamw` and our products.

    python -m examples.maxtext_train

Two functions are replaced before MaxText starts: optax's AdamW, and MaxText's class that multiplies
in FP8 on NVIDIA GPUs, by the provider of `examples.qwix_provider`. docs/examples.md shows how to
start a config of your own like this.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from examples import check

os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # MaxText without the clients of Google Cloud

import maxtext
import optax
from maxtext.layers import quantizations
from maxtext.trainers.pre_train import train as pre_train
from maxtext.utils import max_utils

import coat_jax as coat
from examples.qwix_provider import FP8Provider

SETTINGS = {
    "run_name": "example",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "steps": check.STEPS,
    "per_device_batch_size": check.BATCH,
    "max_target_length": check.LENGTH,
    "vocab_size": check.VOCAB,
    "base_num_decoder_layers": 1,
    "base_emb_dim": 128,
    "base_mlp_dim": 512,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 32,
    "attention": "dot_product",
    "dtype": "float32",
    "learning_rate": 5e-4,
    "warmup_steps_fraction": 0.1,
}
IN_FP8 = {"quantization": "fp8_gpu", "use_qwix_quantization": True}


def adamw(*args: Any, mu_dtype: Any = None, **settings: Any) -> optax.GradientTransformation:
    """AdamW as MaxText calls it, its moments in 8 bits whatever `mu_dtype` is."""
    return coat.optax.fp8_adamw(*args, **settings)


def run(folder: Path, settings: dict[str, Any]) -> check.Run:
    """One run of MaxText on all devices; it writes metrics.jsonl into the folder."""
    metrics = folder / "metrics.jsonl"
    written = {
        "base_output_directory": folder,
        "metrics_file": metrics,
        "dump_jaxpr": True,
        "dump_jaxpr_local_dir": folder / "jaxpr",
        "dump_jaxpr_delete_local_after": False,
    }
    arguments = [f"{name}={value}" for name, value in {**settings, **written}.items()]
    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    memory: list[Any] = []
    remember = mock.patch.object(
        max_utils, "print_compiled_memory_stats", lambda found, prefix="": memory.append(found)
    )
    with remember:
        config, recorder = pre_train.initialize(["train", str(base), *arguments])
        state = pre_train.train_loop(config, recorder)
    lines = metrics.read_text().splitlines()
    losses = [loss for line in lines if (loss := json.loads(line).get("learning/loss"))]
    program = "".join(path.read_text() for path in (folder / "jaxpr").rglob("*"))
    temporary = memory[0].temp_size_in_bytes
    return check.Run(losses, state["model"], state["optimizer"], program, temporary)


def train(fp8: bool, folder: Path | None = None, **settings: Any) -> check.Run:
    """Trains on all devices; with `fp8`, with both replacements."""
    if folder is None:
        with tempfile.TemporaryDirectory() as name:
            return train(fp8, Path(name), **settings)
    if not fp8:
        return run(folder, {**SETTINGS, **settings})
    with (
        mock.patch.object(optax, "adamw", adamw),
        mock.patch.object(quantizations, "NvidaFp8Provider", FP8Provider),
    ):
        return run(folder, {**SETTINGS, **IN_FP8, **settings})


if __name__ == "__main__":
    check.compare(train, fp8_products=True)
