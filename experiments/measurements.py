"""Measurements that need GPUs, and whether their results are those of today's code."""

import json
from pathlib import Path
from typing import NamedTuple

from experiments import measured_code
from experiments.essence import code_hash


class Measurement(NamedTuple):
    """An experiment to run.

    Attributes:
        result: its results file, without the suffix.
        command: the module in `experiments`, and its arguments.
        gpus: how many it needs.
        seconds: roughly what it takes on H200s.
        case: roughly what its longest case takes; None if nothing is left of one that is stopped.
        packages: what must be installed for its comparisons.
    """

    result: str
    command: str
    gpus: int
    seconds: int
    case: int | None = None
    packages: tuple[str, ...] = ()


PLAN = (
    Measurement(
        "training_throughput_4_gpus_beside_one",
        "training_throughput COAT:16 --beside-one",
        4,
        200,
    ),
    Measurement("training_throughput_4_gpus", "training_throughput BF16:8 COAT:8", 4, 200, 120),
    Measurement(
        "training_throughput_2_gpus_beside_one",
        "training_throughput COAT:16 --beside-one",
        2,
        200,
    ),
    Measurement("communication", "communication", 2, 300),
    Measurement("muon_step_2_gpus", "muon_step", 2, 320, 90, ("torch",)),
    Measurement("gpu_suite", "gpu_suite", 1, 360, None, ("pytest",)),
    Measurement("layer_table", "layer_speed --table", 1, 3500, 460, ("torch", "torchao")),
    Measurement(
        "optimizer_step", "optimizer_step", 1, 400, 150, ("torch", "torchao", "bitsandbytes")
    ),
    Measurement("layer_speed", "layer_speed", 1, 480, 310, ("torch", "torchao")),
    Measurement("training_throughput", "training_throughput", 1, 710, 140),
    Measurement(
        "training_throughput_llama_124m_sequence_1024",
        "training_throughput --model llama_124m --sequence 1024 BF16:4 COAT:4 BF16:32 COAT:32",
        1,
        140,
        40,
    ),
    Measurement("muon_step", "muon_step", 1, 240, 90, ("torch",)),
    Measurement("examples_memory", "examples_memory", 1, 420, 60, ("equinox", "qwix", "tunix")),
    Measurement(
        "examples_memory_large",
        "examples_memory --large",
        1,
        150,
        60,
        ("maxtext", "torch", "transformers"),
    ),
    Measurement("quantized_generation", "quantized_generation", 1, 850, 110),
    Measurement("in_place_step", "in_place_step", 1, 180, 30),
    Measurement("activation_memory", "activation_memory", 1, 120, None, ("torch", "torchao")),
    Measurement("group_scaling", "group_scaling", 1, 60),
    Measurement("sharpness_cost", "sharpness_cost", 1, 60),
)


def outdated(measurement: Measurement, out: Path) -> str | None:
    """Why results are not those of today's code; None if they are."""
    path = out / f"{measurement.result}.json"
    if not path.exists():
        return "missing"
    try:
        parents = json.loads(path.read_text())["parents"]
        code, ran = parents.get("code"), parents.get("ran")
    except (ValueError, KeyError, TypeError, AttributeError):
        return "cannot be read"
    if ran:
        if not measured_code.are_notes(ran):
            return "cannot be read"
        files = measured_code.changed(ran, None if parents.get("dirty") else parents.get("commit"))
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        return f"of other code: {', '.join(files[:3])}{more}" if files else None
    return None if code == code_hash() else "of other code"


def cases_file(measurement: Measurement, out: Path) -> Path:
    """The file of finished cases, which measurements share whose cases may be the same."""
    module = measurement.command.split()[0]
    name = f"{module}_{measurement.gpus}_gpus.jsonl"
    return out.absolute() / "unfinished" / "cases" / name
