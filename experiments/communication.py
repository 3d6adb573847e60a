"""What communication costs a step on several GPUs, and what options of XLA and CUDA do about it.

Each case compiles the trainer's own step for the first layers of Llama-2-7B, parameters and moments
sharded over all GPUs, with options of its own. Before, each GPU trains the same layers alone, all
at the same time: GPUs differ by a few percent. A profile of one step shows what each GPU does when:

    compute         at least one kernel runs that is not NCCL's
    communication   at least one of NCCL's kernels runs
    exposed         communication and no compute: what the step waits for

    python -m experiments.communication                    on a machine with several GPUs
    python -m experiments.communication --draw             only draw earlier results

`compute` is more than one GPU needs alone: NCCL's kernels take some of the multiprocessors.
"""

import argparse
import gzip
import json
import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from experiments import training_throughput
from experiments.command import parser_of
from experiments.workers import outcome, run_worker

_MB = 1 << 20
SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
KERNELS = "xla_gpu_experimental_use_collective_kernels"  # collectives that are not NCCL's
SCATTER = "xla_gpu_reduce_scatter_combine_threshold_bytes"
PIPELINES = ("xla_gpu_enable_pipelined_all_gather", "xla_gpu_enable_pipelined_reduce_scatter")

DEFAULTS = "XLA's defaults"
SCHEDULED = "scheduler"
WITHOUT_KERNELS = "scheduler, no kernels of XLA"
SCATTERS_JOINED = "scheduler, no kernels of XLA, 128 MB"
TRAINERS = "the trainer's: all these, and one queue"
PIPELINED = "the trainer's, pipelined"
DRAWN = (DEFAULTS, SCHEDULED, TRAINERS)
PIXEL = 0.02  # ms: the picture does not show shorter gaps


class Case(NamedTuple):
    """What a case changes in the trainer's step.

    Attributes:
        options: of XLA, instead of the trainer's.
        variables: of the environment.
    """

    options: dict[str, bool | int | str]
    variables: dict[str, str]


# By default XLA reduces small arrays with kernels of its own, and joins collectives up to 30 MB;
# CUDA has 8 queues. The last case asks what is left to gain if they begin in an earlier layer.
XLAS_KERNELS, UNJOINED = {KERNELS: "all_reduce"}, {SCATTER: 30 * _MB}
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
CASES = {
    DEFAULTS: Case({SCHEDULER: False, **XLAS_KERNELS, **UNJOINED}, QUEUES),
    SCHEDULED: Case({**XLAS_KERNELS, **UNJOINED}, QUEUES),
    WITHOUT_KERNELS: Case({**UNJOINED}, QUEUES),
    SCATTERS_JOINED: Case({}, QUEUES),
    TRAINERS: Case({}, {}),
    PIPELINED: Case(dict.fromkeys(PIPELINES, True), {}),
}

Interval = tuple[float, float]


class Timeline(NamedTuple):
    """What one GPU does in a step, in milliseconds from the step's first kernel.

    Attributes:
        compute: when kernels other than NCCL's run.
        communication: when kernels of NCCL run.
    """

    compute: list[Interval]
    communication: list[Interval]

    def summary(self) -> dict[str, float]:
        """Milliseconds of the step, of both kinds, and of communication that nothing hides."""
        both = union([*self.compute, *self.communication])
        compute = total(self.compute)
        return {
            "step_ms": both[-1][1],
            "compute_ms": compute,
            "communication_ms": total(self.communication),
            "exposed_ms": total(both) - compute,
        }


def main() -> None:
    """Measures every case, prints a line for each, and writes and draws the results."""
    parser = parser_of(__doc__, draws=True)
    parser.add_argument("case", nargs="?", default="COAT:8", help="PRECISION:BATCH, on each GPU")
    parser.add_argument("--model", default="llama2_7b", help="a name in coat.models.PRESETS")
    parser.add_argument("--layers", type=int, default=8, help="how many of the model's layers")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.cases, options.mesh = [options.case], ""  # for training_throughput
    if options.worker:
        print(json.dumps(measure_with_profile(options)), flush=True)
        return
    path = options.out / "communication.json"
    if not options.draw:
        measure(options, path)
    draw(path)


def measure(options: argparse.Namespace, path: Path) -> None:
    """Measures each GPU alone, then every case; the file is written after each."""
    from experiments import records

    each = training_throughput.each_alone(options.case, options)
    if failed := [one["failed"] for one in each if "failed" in one]:
        raise SystemExit(f"A GPU alone: {failed[0]}")
    alone = [{"ms": 1e3 * one["step_seconds"]} for one in each]
    mean = statistics.mean(one["ms"] for one in alone)
    print(f"{mean:8.1f} ms   a GPU alone, the mean of {len(alone)}", flush=True)
    cases: list[dict[str, Any]] = []
    for name, chosen in CASES.items():
        one = _in_a_process(options, chosen)
        case: dict[str, Any] = {"name": name, **chosen._asdict()}
        if "failed" in one:
            case["failed"] = one["failed"]
        else:
            case["ms"] = 1e3 * one["step_seconds"]
            case |= {"efficiency": mean / case["ms"], "losses": one["losses"]}
            case["timeline"] = one["timeline"]
            if name in DRAWN and one["drawn"]:
                case["drawn"] = one["drawn"]
        print(case.get("failed") or f"{case['ms']:8.1f} ms", name, sep="   ", flush=True)
        cases.append(case)
        figures = {"model": options.model, "layers": options.layers, "case": options.case}
        figures |= {"sequence": options.sequence, "alone": alone, "cases": cases}
        records.write(path, figures)


def _in_a_process(options: argparse.Namespace, chosen: Case) -> dict[str, Any]:
    """A case, with its options and variables."""
    given = " ".join(f"--{option}={str(value).lower()}" for option, value in chosen.options.items())
    arguments = [f"--{name}={getattr(options, name)}" for name in ("model", "layers", "sequence")]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {given}".strip()
    command = ["experiments.communication", options.case, "--worker", *arguments]
    return outcome(run_worker(*command, XLA_FLAGS=flags, **chosen.variables))


def measure_with_profile(options: argparse.Namespace) -> dict[str, Any]:
    """A case in this process: what `training_throughput` measures, and what each GPU did."""
    with tempfile.TemporaryDirectory() as folder:
        measured = training_throughput.measure(options, Path(folder))
        gpus = read(Path(folder))
    timeline = {gpu: one.summary() for gpu, one in gpus.items()}
    kinds = gpus[min(gpus)]._asdict() if gpus else {}
    drawn = {kind: union(times, gap=PIXEL) for kind, times in kinds.items()}
    return {**measured, "timeline": timeline, "drawn": drawn}


def read(folder: Path) -> dict[str, Timeline]:
    """The timelines of a profile that JAX wrote, by GPU."""
    events = []
    for file in sorted(folder.rglob("*.trace.json.gz")):
        events += json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    gpus, streams = {}, {}
    for event in events:
        if event.get("name") == "process_name" and "GPU:" in event["args"]["name"]:
            gpus[event["pid"]] = event["args"]["name"].split("GPU:")[1].split()[0]
        elif event.get("name") == "thread_name" and "Stream" in event["args"]["name"]:
            streams[event["pid"], event["tid"]] = event["args"]["name"]
    found: dict[str, tuple[list[Interval], list[Interval]]] = {}
    for event in events:
        of_kernel = event.get("ph") == "X" and (event["pid"], event.get("tid")) in streams
        if of_kernel and event["pid"] in gpus:
            kinds = found.setdefault(gpus[event["pid"]], ([], []))
            begin = event["ts"] / 1e3
            kind = kinds["nccl" in event["name"].lower()]
            kind.append((begin, begin + event.get("dur", 0) / 1e3))
    timelines = {}
    for gpu, (compute, communication) in sorted(found.items()):
        first = min(begin for begin, _ in compute + communication)
        timelines[gpu] = Timeline(union(compute, first), union(communication, first))
    return timelines


def union(intervals: list[Interval], origin: float = 0.0, gap: float = 0.0) -> list[Interval]:
    """Intervals joined where no more than `gap` lies between them, counted from `origin`.

    >>> union([(4.0, 5.0), (1.0, 2.0), (1.5, 3.0)], origin=1.0)
    [(0.0, 2.0), (3.0, 4.0)]
    """
    joined: list[list[float]] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1] + gap:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return [(round(begin - origin, 4), round(end - origin, 4)) for begin, end in joined]


def total(intervals: list[Interval]) -> float:
    """The length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def draw(path: Path) -> None:
    """Draws one GPU's timeline for XLA's defaults and for the trainer's options."""
    import matplotlib.pyplot as plt

    from experiments import records

    figures = records.read(path)
    drawn = [case for case in figures["cases"] if "drawn" in case]
    if not drawn:
        return
    with plt.rc_context(records.CHART | {"axes.grid": False}):
        size = (11, 1.5 * len(drawn) + 0.8)
        figure, rows = plt.subplots(len(drawn), figsize=size, sharex=True, squeeze=False)
        for axes, case in zip(rows[:, 0], drawn, strict=True):
            compute, communication = case["drawn"]["compute"], case["drawn"]["communication"]
            for height, intervals, color in (
                (1, compute, records.PALE),
                (0, communication, records.INK),
                (0, uncovered(communication, compute), records.ACCENT),
            ):
                bars = [(begin, end - begin) for begin, end in intervals]
                axes.broken_barh(bars, (height - 0.4, 0.8), color=color, linewidth=0)
            axes.set_yticks([1, 0], ["compute", "communication"])
            axes.set_title(f"{case['name']}; orange: nothing else runs", loc="left")
        rows[-1, 0].set_xlabel("ms")
        layers = f"{figures['layers']} layers of {figures['model']}, {figures['case']}"
        figure.suptitle(f"One of the GPUs in one step: {layers}")
        figure.savefig(path.with_suffix(".png"))


def uncovered(intervals: list[Interval], cover: list[Interval]) -> list[Interval]:
    """The parts of disjoint intervals that no interval of `cover`, sorted and disjoint, covers.

    >>> uncovered([(0, 4), (6, 7)], [(1, 2), (3, 5)])
    [(0, 1), (2, 3), (6, 7)]
    """
    edges = [-float("inf"), *(edge for interval in cover for edge in interval), float("inf")]
    gaps = [gap for index, gap in enumerate(pairwise(edges)) if index % 2 == 0]
    return [
        (max(begin, gap_begin), min(end, gap_end))
        for begin, end in intervals
        for gap_begin, gap_end in gaps
        if max(begin, gap_begin) < min(end, gap_end)
    ]


if __name__ == "__main__":
    main()
