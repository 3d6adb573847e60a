"""How fast the trainer trains all parameters of Llama-2-7B, and what memory of a GPU it takes.

Claim (the paper's table 7): 8-bit moments and FP8 activations leave room for larger batches, and
train faster. The script times the trainer's own compiled step: gradients are clipped, parameters
are in BF16 and rounded stochastically, layers are unrolled, sequences have 2048 tokens. As in the
trainer, the host launches a step before it reads the loss of the step before.

    BF16, FP8_LINEAR     optax's AdamW, moments in FP32
    COAT, COAT_LEAN      the fused step, moments in 8 bits

    python -m experiments.training_throughput                     the cases of the table
    python -m experiments.training_throughput COAT:8 BF16:8       others, PRECISION:BATCH
    python -m experiments.training_throughput COAT:16 COAT:16:offloaded:released
    python -m experiments.training_throughput BF16:4 COAT:4 --model llama_124m --sequence 1024
    python -m experiments.training_throughput COAT:2 --model tiny --sequence 64     anywhere

    released      gradients are freed in the backward pass
    offloaded     the optimizer's state is in the host's memory

All GPUs that are seen train together, parameters and moments sharded over all of them, or as --mesh
says; BATCH is the sequences on each. With --beside-one, each GPU then trains each case alone, all
at the same time: GPUs of one kind differ by a few percent, and a step takes as long as on the
slowest. The efficiency is the speed of each of several GPUs over the mean of their speeds alone.
Every case runs in a process of its own, which may use 95 % of each GPU. The peak is that of the
fullest GPU's allocator, and includes the whole training state; tokens are random. A case that does
not fit is reported as such.

Runs of another number of GPUs, or with other options than those of the table, write files of their
own, as training_throughput_4_gpus.json.
"""

import argparse
import dataclasses
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.command import parser_of
from experiments.workers import compiled, count_gpus, only, outcome, run_worker

CASES = [
    "BF16:10",
    "COAT:10",
    "COAT:16",
    "COAT:16:released",
    "COAT:16:offloaded",
    "COAT:16:offloaded:released",
    "COAT:24",
]
OPTIONS = ("offloaded", "released")
MODEL, SEQUENCE = "llama2_7b", 2048
WARMUP, STEPS = 3, 10

Case = dict[str, Any]


def main() -> None:
    """Measures each case in its own process, prints a line for each and writes the results."""
    options = arguments().parse_args()
    if options.worker:
        print(json.dumps(measure(options)), flush=True)
        return
    if not options.draw:
        from experiments import records

        cases: list[Case] = []
        for case in options.cases:
            cases.append(in_a_process(case, options))
            if options.beside_one:
                cases[-1] |= _beside_one(cases[-1], case, options)
            print(_line(cases[-1]), flush=True)
            figures = {"model": options.model, "sequence": options.sequence, "cases": cases}
            records.write(results_path(options), figures)
    draw(results_path(options))


def arguments() -> argparse.ArgumentParser:
    """The parser of the command line."""
    parser = parser_of(__doc__, draws=True)
    parser.add_argument(
        "cases",
        nargs="*",
        type=_case,
        default=CASES,
        metavar="PRECISION:BATCH[:OPTION]",
        help=f"sequences on each GPU, and {' or '.join(OPTIONS)}",
    )
    parser.add_argument("--model", default=MODEL, help="a name in coat.models.PRESETS, or a config")
    parser.add_argument("--layers", type=int, help="only the first layers of the model")
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help="tokens of a sequence")
    parser.add_argument("--mesh", type=_mesh, default="", help="sizes of axes: data=2,fsdp=4")
    parser.add_argument("--beside-one", action="store_true", help="compare with each GPU alone")
    parser.add_argument("--label", help="ends the name of the results file: say, the GPU's")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def results_path(options: argparse.Namespace) -> Path:
    """The results file, whose name has what differs from the runs of the table."""
    import jax

    gpus = jax.device_count()
    differences = {
        options.model.replace("/", "_"): options.model != MODEL,
        f"{options.layers}_layers": options.layers is not None,
        f"sequence_{options.sequence}": options.sequence != SEQUENCE,
        f"{gpus}_gpus": gpus > 1,
        options.mesh.replace("=", "_").replace(",", "_"): options.mesh != "",
        "beside_one": options.beside_one,
        options.label: options.label is not None,
    }
    parts = ["training_throughput", *(name for name, differs in differences.items() if differs)]
    return Path(options.out / f"{'_'.join(parts)}.json")


def _beside_one(together: Case, case: str, options: argparse.Namespace) -> Case:
    """The speed of each GPU alone, and how the speed of each of several GPUs compares with it."""
    alone = each_alone(case, options)
    if any("failed" in one for one in [together, *alone]):
        return {"alone": alone}
    share = together["tokens_per_second"] / together["devices"]
    speeds = [one["tokens_per_second"] for one in alone]
    return {"alone": alone, "efficiency": share / statistics.mean(speeds)}


def each_alone(case: str, options: argparse.Namespace) -> list[Case]:
    """Measures a case on each GPU alone, on all of them at the same time."""
    gpus = range(max(1, count_gpus()))
    with ThreadPoolExecutor(len(gpus)) as pool:
        return list(pool.map(lambda gpu: in_a_process(case, options, gpu), gpus))


def in_a_process(case: str, options: argparse.Namespace, alone: int | None = None) -> Case:
    """Measures a case, PRECISION:BATCH, in a process that sees all GPUs, or one alone."""
    arguments = ["--model", options.model, "--sequence", str(options.sequence)]
    arguments += ["--layers", str(options.layers)] if options.layers else []
    if alone is None:
        arguments += ["--mesh", options.mesh]
    worker = ["experiments.training_throughput", case, "--worker", *arguments]
    sees = {} if alone is None else only([alone])
    return {**_parsed(case), **outcome(run_worker(*worker, **sees))}


def _case(text: str) -> str:
    """A case of the command line, if it is one."""
    _, batch, *given = text.split(":") if ":" in text else (text, "")
    if not batch.isdecimal() or int(batch) < 1 or not set(given) <= set(OPTIONS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not PRECISION:BATCH, as in COAT:16, with {' or '.join(OPTIONS)} after it"
        )
    return text


def _mesh(text: str) -> str:
    """Sizes of a mesh, if that is what they are."""
    try:
        sizes_of(text)
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not as in data=2,fsdp=4") from None
    return text


def sizes_of(mesh: str) -> dict[str, int]:
    """Sizes by axis, as `MeshConfig` takes them.

    >>> sizes_of("data=2,fsdp=4")
    {'data': 2, 'fsdp': 4}
    """
    pairs = (pair.split("=") for pair in mesh.split(",") if mesh)
    return {axis: int(size) for axis, size in pairs}


def _parsed(case: str) -> Case:
    precision, batch, *given = case.split(":")
    options = {option: option in given for option in OPTIONS}
    return {"precision": precision, "batch": int(batch), **options}


def _line(case: Case) -> str:
    head = f"{_name(case):40}"
    if "failed" in case:
        return f"{head}   {case['failed']}"
    alone = f"   {case['efficiency']:.3f} of a GPU alone" if "efficiency" in case else ""
    speed, peak = case["tokens_per_second"], case["peak"] / 1e9
    return f"{head}   {speed:8,.0f} tokens/s   {peak:6.1f} GB{alone}"


def measure(options: argparse.Namespace, trace: Path | None = None) -> Case:
    """One case: seconds of a step, and what it takes in memory; `trace` takes a profile of one."""
    (case,) = map(_parsed, options.cases)
    import jax

    from coat_jax.training.cluster.mesh import batch_parts, make_mesh
    from coat_jax.training.compilation import use_one_queue
    from coat_jax.training.config import MeshConfig
    from coat_jax.training.report import accounting
    from coat_jax.training.setup import prepare
    from experiments.random_batch import random_batch

    use_one_queue(offload=case["offloaded"])
    mesh = make_mesh(MeshConfig(**sizes_of(options.mesh)))
    device = mesh.local_devices[0]
    config = config_of(case, options, batch_parts(mesh))
    with jax.set_mesh(mesh):
        prepared = prepare(config, mesh)
        program, compile_seconds = compiled(prepared.lower)
        memory = accounting.account(
            config, prepared.abstract, program, batch_parts=batch_parts(mesh), device=device
        )
        data = random_batch(config, mesh)
        state = prepared.new_state()
        losses, ended = [], []
        state, waiting = program(state, data)
        for _ in range(1, config.total_steps):
            state, report = program(state, data)
            losses.append(float(waiting.loss))
            ended.append(time.perf_counter())
            waiting = report
        losses.append(float(waiting.loss))
        ended.append(time.perf_counter())
        seconds = [after - before for before, after in pairwise(ended)]
        if trace:
            with jax.profiler.trace(str(trace)):
                state, report = program(state, data)
                jax.block_until_ready(report)
    per_step = statistics.median(seconds[WARMUP:])
    stats = [one.memory_stats() or {} for one in mesh.devices.flat]
    return {
        **case,
        "devices": mesh.size,
        "step_seconds": per_step,
        "tokens_per_second": config.tokens_per_step / per_step,
        "peak": max(of_one.get("peak_bytes_in_use", memory.peak) for of_one in stats),
        "memory": memory._asdict(),
        "compile_seconds": compile_seconds,
        "losses": losses,
    }


def config_of(case: Case, options: argparse.Namespace, parts: int) -> Any:
    """The config of a case on devices that see `parts` different batches."""
    import jax.numpy as jnp

    from coat_jax import models
    from coat_jax.training.config import OptimizerConfig, TrainConfig
    from coat_jax.training.config_files import load_config

    name = case["precision"]
    if options.model.lower() in models.PRESETS:
        model = models.config_of(options.model)
    else:
        model = load_config(options.model).model
    model = dataclasses.replace(model, layers=options.layers or model.layers)
    return TrainConfig(
        model=dataclasses.replace(model, precision=name, param_dtype=jnp.bfloat16, scan=False),
        optimizer=OptimizerConfig(
            name="fp8_adamw" if name.startswith("COAT") else "adamw",
            learning_rate=1e-5,
            schedule="constant",
            warmup_steps=0,
            release_gradients=case["released"],
            offload=case["offloaded"],
        ),
        total_steps=WARMUP + STEPS + 1,
        global_batch_size=case["batch"] * parts,
        sequence_length=options.sequence,
    )


def _name(case: Case) -> str:
    options = [option for option in OPTIONS if case[option]]
    return ", ".join([case["precision"], f"batch {case['batch']}", *options])


def draw(path: Path) -> None:
    """Draws tokens per second and peak memory of each case."""
    import matplotlib.pyplot as plt

    from experiments import records

    figures = records.read(path)
    shown = [case for case in figures["cases"] if "failed" not in case][::-1]
    if not shown:
        return
    names = [_name(case) for case in shown]
    colors = [records.ACCENT if "COAT" in name else records.PALE for name in names]
    with plt.rc_context(records.CHART | {"axes.grid.axis": "x"}):
        figure, panels = plt.subplots(1, 2, figsize=(11, 0.5 * len(shown) + 1.6))
        for axes, values, title, form in (
            (panels[0], [c["tokens_per_second"] for c in shown], "tokens a second", "{:,.0f}"),
            (panels[1], [c["peak"] / 1e9 for c in shown], "peak memory, GB", "{:.1f}"),
        ):
            bars = axes.barh(names, values, color=colors, height=0.7)
            axes.bar_label(bars, [form.format(v) for v in values], padding=3, fontsize=8)
            axes.set_title(title)
            axes.margins(x=0.15)
        gpus = shown[0]["devices"]
        where = "one GPU" if gpus == 1 else f"{gpus} GPUs"
        figure.suptitle(
            f"Training {figures['model']} on {where}, sequences of {figures['sequence']}"
        )
        figure.savefig(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
