"""Speed and memory of training Llama-2-7B, of a small model, and of Llama-2-13B."""

import math
from typing import Any

from experiments.figures.measured.files import GB, bold, case, of, ratio
from experiments.training_throughput import OPTIONS

SMALL_MODEL = "training_throughput_llama_124m_sequence_1024"
LARGER_MODEL = "training_throughput_llama2_13b"  # on an H100
LARGER_MODEL_ON_H200 = "training_throughput_llama2_13b_h200"
PRECISIONS = ["BF16", "FP8_LINEAR", "COAT", "COAT_LEAN"]


def training(precision: str, batch: int, *options: str, gpus: int = 1) -> dict[str, Any]:
    """A case of training_throughput, with these of its options."""
    if gpus > 1:  # results of before there were options
        return case(f"training_throughput_{gpus}_gpus", precision=precision, batch=batch)
    chosen = {option: option in options for option in OPTIONS}
    return case("training_throughput", precision=precision, batch=batch, **chosen)


def seven_billion() -> tuple[float, float]:
    """How many times as fast, in how many times less memory, COAT trains on one GPU."""
    return _beside_bf16(training("COAT", 10), training("BF16", 10))


def slower(*options: str, than: tuple[str, ...] = ()) -> float:
    """By how many percent a step with these options takes longer than one with those of `than`."""
    base = training("COAT", 16, *than)
    return 100 * (ratio("step_seconds", training("COAT", 16, *options), base) - 1)


def larger_model_slower(name: str, batch: int) -> float:
    """By how many percent a step of Llama-2-13B is longer with its moments in host memory."""
    on_gpu = case(name, batch=batch, offloaded=False)
    return 100 * (ratio("step_seconds", case(name, batch=batch, offloaded=True), on_gpu) - 1)


def off_by(name: str = "training_throughput") -> float:
    """GB between the allocator's peak and XLA's account, at most, of the cases that fit."""
    cases = [case for case in of(name)["cases"] if "failed" not in case]
    return math.ceil(max(abs(c["peak"] - c["memory"]["peak"]) for c in cases) / GB * 100) / 100


def compilation(keeps_everything: bool) -> list[float]:
    """Seconds to compile COAT's step: least and most the first time, then with a cache.

    Of the cases that keep gradients and moments on the GPU, or of the others.
    """
    steps = [
        case
        for case in of("training_throughput")["cases"]
        if case["precision"] == "COAT" and bool(_options_of(case)) != keeps_everything
    ]
    return [
        extreme(step[key] for step in steps)
        for key in ("compile_seconds", "warm_compile_seconds")
        for extreme in (min, max)
    ]


def beside_one(gpus: int) -> tuple[float, float, float]:
    """Tokens a second of COAT on several GPUs, and the speed of each of them as a share of its
    speed alone: of the mean, and of the slowest one's.
    """
    found = together(gpus)
    return found["tokens_per_second"], found["efficiency"], found["beside_slowest"]


def gpus_differ(gpus: int) -> tuple[float]:
    """By how many percent the fastest GPU alone is faster than the slowest."""
    speeds = [one["tokens_per_second"] for one in together(gpus)["alone"]]
    return (100 * (max(speeds) / min(speeds) - 1),)


def waiting() -> list[float]:
    """By how many percent a step of COAT and of BF16 is longer if the host waits for each step."""
    cases = (training(precision, 10) for precision in ("COAT", "BF16"))
    return [100 * (one["awaited_step_seconds"] / one["step_seconds"] - 1) for one in cases]


def together(gpus: int) -> dict[str, Any]:
    """The case in which several GPUs train together."""
    return case(f"training_throughput_{gpus}_gpus_beside_one", precision="COAT", batch=16)


def all_rows() -> list[list[str]]:
    """Every case, by batch."""
    return _rows(of("training_throughput")["cases"])


def plain_rows() -> list[list[str]]:
    """The cases that keep everything on the GPU."""
    return _plain_rows([c for c in of("training_throughput")["cases"] if not _options_of(c)])


def small_rows() -> list[list[str]]:
    """The cases of a model of 124 million parameters."""
    return _plain_rows(of(SMALL_MODEL)["cases"])


def small(batch: int) -> tuple[float, float]:
    """How many times as fast, in how many times less memory, COAT trains the small model."""
    return _beside_bf16(*(case(SMALL_MODEL, precision=p, batch=batch) for p in ("COAT", "BF16")))


def _beside_bf16(coat: dict[str, Any], bf16: dict[str, Any]) -> tuple[float, float]:
    return ratio("tokens_per_second", coat, bf16), ratio("peak", bf16, coat)


def _plain_rows(cases: list[dict[str, Any]]) -> list[list[str]]:
    """Without the column of options."""
    return [[*row[:2], *row[3:]] for row in _rows(cases)]


def _rows(cases: list[dict[str, Any]]) -> list[list[str]]:
    rows = [["precision", "batch", "", "tokens/s", "peak memory, GB"]]
    for one in sorted(cases, key=lambda c: (PRECISIONS.index(c["precision"]), c["batch"])):
        rows.append(
            [
                bold(one["precision"], one["precision"] == "COAT"),
                str(one["batch"]),
                _options_of(one),
                f"{one['tokens_per_second']:,.0f}",
                f"{one['peak'] / GB:.1f}",
            ]
        )
    return rows


def _options_of(case: dict[str, Any]) -> str:
    named = {"offloaded": "moments in host memory", "released": "gradients released"}
    return ", ".join(words for option, words in named.items() if case.get(option))
