"""Training in docs/benchmarks.md: throughput and communication."""

import statistics
from typing import Any

from experiments.communication import (
    DEFAULTS,
    PIPELINED,
    SCATTERS_JOINED,
    SCHEDULED,
    TRAINERS,
    WITHOUT_KERNELS,
)
from experiments.figures.compare import Figure, Given, Sentence, Table
from experiments.figures.measured import throughput
from experiments.figures.measured.files import GB, case, of, ratio
from experiments.figures.measured.throughput import (
    LARGER_MODEL,
    LARGER_MODEL_ON_H200,
    beside_one,
    larger_model_slower,
    slower,
    training,
)
from experiments.figures.pages.reasons import PAPER, SETTING

FOUR_GPUS = "training_throughput_8_layers_4_gpus"


def offloaded() -> tuple[float, float, float]:
    """GB that moments in host memory leave free, and how much longer a step takes, in percent."""
    freed = training("COAT", 16)["peak"] - training("COAT", 16, "offloaded")["peak"]
    longer = slower("offloaded", "released", than=("released",))
    return freed / GB, slower("offloaded"), longer


def larger_model() -> tuple[float, ...]:
    """Llama-2-13B: its batch and peak in GB by where moments are, and the limit of an H100."""
    gpu, host = (of("offloaded_memory")[place][1] for place in ("gpu", "host"))
    (limit,) = {one["memory"]["limit"] for one in of(LARGER_MODEL)["cases"]}
    return (
        *(gpu["batch"], gpu["sequence"], gpu["peak"] / GB),
        *(limit / GB, host["on_host"] / GB, host["peak"] / GB),
    )


def larger_model_rows() -> list[list[str]]:
    """Llama-2-13B on each GPU: its speed and peak by batch and by where moments are."""
    rows = [["GPU", "batch", "moments", "tokens a second", "peak, GB"]]
    for name, gpu in ((LARGER_MODEL, "H100"), (LARGER_MODEL_ON_H200, "H200")):
        for one in sorted(of(name)["cases"], key=lambda one: (one["batch"], one["offloaded"])):
            moments = "in host memory" if one["offloaded"] else "on the GPU"
            speed, peak = f"{one['tokens_per_second']:,.0f}", f"{one['peak'] / GB:.1f}"
            rows.append([gpu, str(one["batch"]), moments, speed, peak])
    return rows


def larger_model_gains() -> float:
    """By how many percent training on the H100 is faster with moments in host memory, at 6 x 2048
    tokens, than with them on the GPU, at 3 x 2048.
    """
    host = case(LARGER_MODEL, batch=6, offloaded=True)
    return 100 * (ratio("tokens_per_second", host, case(LARGER_MODEL, offloaded=False)) - 1)


def four_gpus() -> list[float]:
    """Tokens a second and GB of COAT and of BF16, and the ratio of each."""
    coat, bf16 = (training(precision, 8, gpus=4) for precision in ("COAT", "BF16"))
    pairs = [number for c in (coat, bf16) for number in (c["tokens_per_second"], c["peak"] / GB)]
    return [*pairs, ratio("tokens_per_second", coat, bf16), ratio("peak", bf16, coat)]


def communication() -> list[list[str]]:
    """Every case, after the GPUs alone."""
    measured = of("communication")
    header = ["options", "ms a step", "share of a GPU's speed alone"]
    rows = [[*header, "compute, ms", "communication, ms", "exposed, ms"]]
    alone = statistics.mean(one["ms"] for one in measured["alone"])
    rows.append(["a GPU alone, the mean of both", f"{alone:.1f}", "1.000", "", "", ""])
    kinds = "compute_ms", "communication_ms", "exposed_ms"
    for one in measured["cases"]:
        shown = [one["name"], f"{one['ms']:.1f}", f"{one['efficiency']:.3f}"]
        rows.append([*shown, *(f"{_awaited(one)[kind]:.1f}" for kind in kinds)])
    return rows


def on_four_gpus() -> list[float]:
    """Milliseconds of a step: with the trainer's options, without one queue, and without both."""
    names = (f"{FOUR_GPUS}_{label}" for label in ("one_queue", "8_queues", "8_queues_30_mb"))
    return [1e3 * case(name, precision="COAT")["step_seconds"] for name in names]


def two_gpus(options: str) -> dict[str, Any]:
    """A case of communication."""
    return case("communication", name=options)


def exposed(options: str) -> float:
    """Milliseconds of a step in which the GPU that the other waits for only communicates."""
    return _awaited(two_gpus(options))["exposed_ms"]


def saved(options: str, beside: str) -> float:
    """By how many percent a step is shorter with the first options than with the second."""
    return 100 * (1 - ratio("ms", two_gpus(options), two_gpus(beside)))


def _awaited(one: dict[str, Any]) -> dict[str, float]:
    """What the GPU does that waits least: while another waits for it, that one's NCCL runs, too."""
    timelines: list[dict[str, float]] = list(one["timeline"].values())
    return min(timelines, key=lambda timeline: timeline["exposed_ms"])


FIGURES: list[Figure] = [
    Sentence(
        "Training Llama-2-7B is {:.2f} times as fast as in BF16, in {:.2f} times less memory",
        throughput.seven_billion,
    ),
    Sentence("was within {:.2f} GB of it", lambda: (throughput.off_by(),)),
    Table("training_throughput", throughput.all_rows),
    Sentence(
        "With the moments in host memory, a step at a batch of 16 takes {:.1f} GB less of the GPU "
        "and {:.0f} % longer. If gradients are also "
        "[released](optimizers.md#gradients-that-are-freed-in-the-backward-pass), a step takes "
        "only {:.1f} % longer than with the moments on the GPU",
        offloaded,
    ),
    Sentence(
        "With released gradients and {:.0f} x {:.0f} tokens, a step of Llama-2-13B in COAT takes "
        "{:.1f} GB if the moments are on the GPU. JAX uses at most {:.1f} GB of an H100, with "
        "`XLA_PYTHON_CLIENT_MEM_FRACTION` at 0.95 (by default it uses three quarters of the GPU). "
        "With {:.1f} GB of moments in host memory, the step takes {:.1f} GB",
        larger_model,
    ),
    Table(LARGER_MODEL, larger_model_rows),
    Sentence(
        "On an H200 the moments of 6 sequences also fit on the GPU; a step is {:.1f} % longer with "
        "them in host memory.",
        lambda: (larger_model_slower(LARGER_MODEL_ON_H200, 6),),
    ),
    Sentence(
        "On the H100, moments in host memory leave room for twice the batch, and training is then "
        "{:.0f} % faster. With 3 sequences a step is {:.0f} % longer",
        lambda: (larger_model_gains(), larger_model_slower(LARGER_MODEL, 3)),
    ),
    Sentence(
        "agreed with the allocator within {:.2f} GB",
        lambda: (max(map(throughput.off_by, (LARGER_MODEL, LARGER_MODEL_ON_H200))),),
    ),
    Sentence(
        "At a batch of 10 COAT is {:.2f} times as fast as BF16 in {:.2f} times less memory.",
        throughput.seven_billion,
    ),
    Sentence(
        "COAT trains {:,.0f} tokens a second in {:.1f} GB of each GPU, BF16 {:,.0f} in {:.1f} GB: "
        "{:.2f} times as fast in {:.2f} times less memory.",
        four_gpus,
    ),
    Given("The paper reports 1.45 and 1.54 on H100s", PAPER),
    Sentence(
        "On one GPU and at a batch of 10, waiting makes a step of COAT {:.1f} % longer, and one of "
        "BF16 {:.1f} %.",
        throughput.waiting,
    ),
    Sentence(
        "On two GPUs COAT trains {:,.0f} tokens a second, per GPU {:.3f} of the mean of the two "
        "alone. On four it trains {:,.0f}, per GPU {:.3f} of the mean and {:.3f} of the slowest: "
        "alone, the fastest of these four is {:.1f} % faster.",
        lambda: (*beside_one(2)[:2], *beside_one(4), *throughput.gpus_differ(4)),
    ),
    Table("training_throughput_llama_124m", throughput.small_rows),
    Sentence(
        "At a batch of 4, COAT is {:.2f} times as fast as BF16 in {:.2f} times less memory, at a "
        "batch of 32 it is {:.2f} times as fast in {:.2f} times less.",
        lambda: throughput.small(4) + throughput.small(32),
    ),
    Given(
        "in the run before, on another host, COAT was 0.95 times as fast at a batch of 4",
        "results/training_throughput_llama_124m_sequence_1024.json of commit d03dbab77",
    ),
    Table("communication", communication),
    Given("By default XLA joins them up to 30 MB", SETTING),
    Sentence(
        "Each of the two GPUs then has {:.3f} of the speed that it has alone, and {:.1f} ms of the "
        "communication are exposed.",
        lambda: (two_gpus(DEFAULTS)["efficiency"], exposed(DEFAULTS)),
    ),
    Sentence(
        "{:.1f} ms are then exposed.",
        lambda: (exposed(SCHEDULED),),
    ),
    Sentence(
        "Without these kernels {:.1f} ms are exposed, and a step takes {:.1f} % less time.",
        lambda: (exposed(WITHOUT_KERNELS), saved(WITHOUT_KERNELS, SCHEDULED)),
    ),
    Sentence(
        "Joined up to 128 MB, they leave {:.1f} ms exposed, and a step takes {:.1f} % less time.",
        lambda: (exposed(SCATTERS_JOINED), saved(SCATTERS_JOINED, WITHOUT_KERNELS)),
    ),
    Sentence(
        "{:.1f} ms are exposed, a step takes {:.1f} % less time, and each GPU has {:.3f} of the "
        "speed that it has alone.",
        lambda: (
            *(exposed(TRAINERS), saved(TRAINERS, SCATTERS_JOINED)),
            two_gpus(TRAINERS)["efficiency"],
        ),
    ),
    Sentence(
        "With more sequences there is more computation to hide the same communication, and the "
        "options matter less. On four GPUs, with eight layers and 16 sequences on each, a step "
        "takes {:.1f} ms with the trainer's options, {:.1f} with CUDA's 8 queues, and {:.1f} if "
        "reduce-scatters are also joined only up to 30 MB",
        on_four_gpus,
    ),
    Sentence(
        "With pipelined collectives a step takes {:.1f} % more time.",
        lambda: (-saved(PIPELINED, TRAINERS),),
    ),
    Given(
        "In an earlier run, at commit afb15b5e2, joining all-gathers up to 256 MB as well took "
        "0.6 % more time, four collectives at a time 0.4 % more, and only 8 multiprocessors for "
        "NCCL (`NCCL_MAX_CTAS=8`) 4.7 % more.",
        "results/communication.json of that commit",
    ),
]
