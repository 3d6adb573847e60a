"""Sentences of the pages with figures, and where each figure comes from."""

import math
from collections.abc import Sequence
from typing import Any

from coat_jax.kernels.dispatch import FIRST_WITH_FP8
from coat_jax.models import PRESETS, parameters_count
from coat_jax.models.config import Config
from coat_jax.numerics.expansion import GROUP_SIZE
from coat_jax.training.cluster.communication import OPTIONS
from experiments.communication import DEFAULTS, GATHER, PIPELINED, SCATTER, TRAINERS
from experiments.figures import stability
from experiments.figures.pages import Sentence
from experiments.figures.results import (
    GB,
    accumulated,
    beside_one,
    case,
    error_over_ours,
    layer,
    loss_effects,
    loss_runs,
    muon,
    of,
    step,
    training,
    unit,
)
from experiments.loss_study.results import baselines_of
from experiments.loss_study.statistics import above
from experiments.stacks import Sizes

README, BENCHMARKS = "README.md", "docs/benchmarks.md"
ARCHITECTURE, LAYERS = "docs/architecture.md", "docs/layers.md"
LOSS, IDEAS = "docs/loss.md", "docs/ideas.md"
FORMATS = "docs/formats.md"
B2S = (0.95, 0.999)
ROUNDINGS = STOCHASTIC, NEAREST = "v stochastic", "v to nearest"
CAPABILITY = FIRST_WITH_FP8 / 10
MOMENTS = 2 * (1 + 5 / GROUP_SIZE)  # bytes a parameter: codes, and 5 bytes a group


def bits(numbers: str, fmt: str, which: str = "theory") -> float:
    """The bits that a format gets right of numbers of this distribution."""
    return of("format_sqnr")["bits"][numbers][fmt][which]


def lost_at_the_maximum(numbers: str) -> float:
    """The bits of INT8 that the range up to the maximum of a tensor costs."""
    return bits(numbers, "INT8", "tensor") - bits(numbers, "INT8", "tensor at its maximum")


def ratio(of_what: str, first: Any, second: Any) -> float:
    """One case's figure over another's."""
    return first[of_what] / second[of_what]


def tokens() -> float:
    """Of the run of training_curves."""
    settings = of("training_curves")["settings"]
    return settings["steps"] * settings["batch"] * settings["sequence"]


def epochs() -> float:
    """How often that run saw its text."""
    return tokens() / of("training_curves")["settings"]["tokens of text"]


def held_out() -> tuple[float, float]:
    """The last held-out losses of that run, in BF16 and in COAT."""
    base, ours = (curve["held out"] for curve in of("training_curves")["curves"].values())
    last = max(base, key=int)
    return base[last], ours[last]


def off_by() -> float:
    """GB between the allocator's peak and XLA's account, at most."""
    cases = of("training_throughput")["cases"]
    return math.ceil(max(abs(c["peak"] - c["memory"]["peak"]) for c in cases) / GB * 100) / 100


def speed_up(name: str, other: str) -> tuple[float, float]:
    """The smallest and the largest over the sizes of layer_table."""
    cases = of("layer_table")["cases"]
    by_size: dict[tuple[int, ...], dict[str, float]] = {}
    for c in cases:
        by_size.setdefault((c["width"], c["batch"], c["sequence"]), {})[c["layer"]] = c["ms"]
    ratios = [ms[other] / ms[name] for ms in by_size.values()]
    return min(ratios), max(ratios)


def exact_scale_gains(tensor: str) -> float:
    """By how many percent an exact scale lowers an error of granularity."""
    recorded = of("granularity")["recorded"]
    exact, ours = (recorded[way]["errors"][tensor] for way in ("1 x 16", "1 x 16, 2^n (ours)"))
    return 100 * (1 - exact / ours)


def accumulated_over_ours(b2: float, storage: str, roundings: Sequence[str]) -> float:
    """The error in the layers over that of coat_jax as shipped, with the best of the roundings."""
    ours = accumulated(b2, "layers", f"directions and logarithms, {STOCHASTIC}")
    return min(accumulated(b2, "layers", f"{storage}, {r}") for r in roundings) / ours


def bytes_a_parameter(*kinds: str) -> float:
    """Of llama2_7b on each of its GPUs, by config_memory."""
    memory = of("config_memory")["llama2_7b"]["COAT"]
    parameters = parameters_count(PRESETS["llama2_7b"]) / memory["gpus"]
    return sum(memory[kind] for kind in kinds) / parameters


def peaks(name: str) -> tuple[float, float]:
    """GB of a config in COAT and in BF16."""
    variants = of("config_memory")[name]
    return variants["COAT"]["peak"] / GB, variants["BF16"]["peak"] / GB


def two_gpus(options: str) -> dict[str, Any]:
    """A case of communication."""
    (found,) = (c for c in of("communication")["cases"] if c["name"] == options)
    return found


def exposed(options: str) -> float:
    """Milliseconds of a step in which GPU 0 only communicates."""
    return two_gpus(options)["timeline"]["0"]["exposed_ms"]


STUDY = "40M", 5e-4  # the runs of loss_study that the pages quote


def loss_of(arm: str) -> tuple[float, float]:
    """What an arm costs in training loss, and half of its interval, in percent."""
    effect = loss_effects(*STUDY).effects[arm]
    return round(100 * effect.mean, 2) + 0.0, 100 * effect.half


def loss_extremes() -> tuple[float, float]:
    """How far single runs end below and above the baselines of their seed, in percent."""
    rows = loss_runs(*STUDY)
    by_arm = above(rows, baselines_of(rows)).values()
    gaps = [100 * gap for by_seed in by_arm for runs in by_seed.values() for gap in runs]
    return -min(gaps), max(gaps)


def loss_floor() -> float:
    """The standard deviation between two baselines of one seed, in percent."""
    return 100 * math.sqrt(2) * loss_effects(*STUDY).noise.floor


def loss_band() -> float:
    """The largest mean over four seeds that rounding alone explains, in percent."""
    comparison = loss_effects(*STUDY)
    return 100 * comparison.noise.band(4, comparison.baselines)


def loss_of_muon() -> tuple[float, ...]:
    """What `fp8_muon` costs in training and held-out loss, with half of each interval."""
    found = (loss_effects(*STUDY, muon=True, held_out=held).effects for held in (False, True))
    effects = [one["fp8_muon"] for one in found]
    return tuple(100 * number for one in effects for number in (one.mean, one.half))


def loss_124m() -> tuple[float, float, float]:
    """Of COAT, of COAT after BF16 and of one baseline over the other, in percent, in one seed."""
    rows = loss_runs("124M", 6e-4)
    by_arm = above(rows, baselines_of(rows))
    coat, after, base, other = (
        by_arm[arm][0][0] for arm in ("coat", "coat_after_bf16", "bf16", "bf16_ulp")
    )
    return 100 * coat, 100 * after, 100 * abs(base - other)


def tokens_124m() -> float:
    """Millions of tokens that each of these runs reads."""
    return of_run(loss_runs("124M", 6e-4)[0]["settings"])


def of_run(settings: dict[str, int]) -> float:
    """Millions of tokens of a run of loss_study."""
    return settings["steps"] * settings["batch"] * settings["sequence"] / 1e6


def loss_tokens() -> float:
    """Millions of tokens that each run of loss_study reads."""
    return of_run(loss_runs(*STUDY)[0]["settings"])


def group() -> dict[str, Any]:
    """The group of moments that docs/ideas.md shows."""
    return of("ideas")["group"]


def millions(config: Config) -> float:
    """Parameters of a preset."""
    return parameters_count(config) / 1e6


COAT_10, BF16_10 = training("COAT", 10), training("BF16", 10)
PLAIN, OFFLOADED = training("COAT", 16), training("COAT", 16, "offloaded")
RELEASED, BOTH = training("COAT", 16, "released"), training("COAT", 16, "offloaded", "released")
COAT_4, BF16_4 = training("COAT", 8, gpus=4), training("BF16", 8, gpus=4)
SUITE = of("gpu_suite")
COAT_LAYER, BF16_LAYER = layer("coat_jax COAT"), layer("coat_jax BF16")
TENSORWISE = "torchao float8 tensorwise, compiled"


def slower(case: dict[str, Any]) -> float:
    """By how many percent a step takes longer than with everything on the GPU."""
    return 100 * (case["step_seconds"] / PLAIN["step_seconds"] - 1)


def over_products(gpus: int) -> float:
    """The time of a step of fp8_muon over that of its products."""
    return muon("coat fp8_muon", gpus)["over_products"]


def faster_in_place(way: str) -> tuple[float, float]:
    """How many times as long as optax's a step takes, at least and at most."""
    cases = {(c["case"], c["way"]): c["ms"] for c in of("in_place_step")["cases"]}
    ratios = [ms / cases[name, "optax"] for (name, other), ms in cases.items() if other == way]
    return min(ratios), max(ratios)


def seven_billion() -> tuple[float, float]:
    """How many times as fast, in how many times less memory, Llama-2-7B trains on one GPU."""
    return ratio("tokens_per_second", COAT_10, BF16_10), ratio("peak", BF16_10, COAT_10)


SENTENCES = [
    # README
    Sentence(
        README,
        "AdamW's two moments take {:.2f} bytes a parameter instead of {:.0f}.",
        lambda: (MOMENTS, 8),
    ),
    Sentence(
        README,
        "A Llama layer saves {:.1f} U for its backward pass, where BF16 saves {:.1f}.",
        lambda: (unit("COAT"), unit("BF16")),
    ),
    Sentence(
        README,
        "COAT trains {:.2f} times as fast as BF16 with FP32 moments, in {:.2f} times less memory",
        seven_billion,
    ),
    Sentence(
        README,
        "A Llama of 40 million parameters, trained on {:.1f} million tokens from several seeds",
        lambda: (loss_tokens(),),
    ),
    Sentence(
        README,
        "8-bit moments alone: {:+.2f} % ± {:.2f} (95 % interval)",
        lambda: loss_of("moments"),
    ),
    Sentence(
        README,
        "FP8 products and activations alone: {:+.2f} % ± {:.2f}",
        lambda: loss_of("activations"),
    ),
    Sentence(
        README,
        "in BF16 (`--bf16_steps 0.25`): {:+.2f} % ± {:.2f}",
        lambda: loss_of("coat_after_bf16"),
    ),
    Sentence(
        README,
        "Two BF16 runs that differ only in rounding end {:.3f} % apart.",
        lambda: (loss_floor(),),
    ),
    Sentence(README, "compute capability {:.1f} or newer", lambda: (CAPABILITY,)),
    # docs/benchmarks.md
    Sentence(BENCHMARKS, "was within {:.2f} GB of it", lambda: (off_by(),)),
    Sentence(
        BENCHMARKS,
        "At a batch of 10 COAT is {:.2f} times as fast as BF16 in {:.2f} times less memory.",
        seven_billion,
    ),
    Sentence(
        BENCHMARKS,
        "With the moments in host memory, a step at a batch of 16 takes {:.1f} GB less of the GPU "
        "and {:.0f} % longer. If gradients are released, too, it takes {:.1f} % longer",
        lambda: ((PLAIN["peak"] - OFFLOADED["peak"]) / GB, slower(OFFLOADED), slower(BOTH)),
    ),
    Sentence(
        BENCHMARKS,
        "COAT trains {:,.0f} tokens a second in {:.1f} GB of each GPU, BF16 {:,.0f} in {:.1f} GB: "
        "{:.2f} times as fast in {:.2f} times less memory.",
        lambda: (
            COAT_4["tokens_per_second"],
            COAT_4["peak"] / GB,
            BF16_4["tokens_per_second"],
            BF16_4["peak"] / GB,
            ratio("tokens_per_second", COAT_4, BF16_4),
            ratio("peak", BF16_4, COAT_4),
        ),
    ),
    Sentence(
        BENCHMARKS,
        "On two GPUs COAT trains {:,.0f} tokens a second, {:.3f} of the speed of one GPU on each; "
        "on four {:,.0f}, {:.3f} of it.",
        lambda: beside_one(2) + beside_one(4),
    ),
    Sentence(
        BENCHMARKS,
        "each of the two GPUs has {:.3f} of the speed of one alone; with XLA's defaults it has "
        "{:.3f}.",
        lambda: [two_gpus(options)["efficiency"] for options in (TRAINERS, DEFAULTS)],
    ),
    Sentence(
        BENCHMARKS,
        "Of the communication, {:.1f} ms are exposed instead of {:.1f}.",
        lambda: (exposed(TRAINERS), exposed(DEFAULTS)),
    ),
    Sentence(BENCHMARKS, "expose less, {:.1f} ms,", lambda: (exposed(PIPELINED),)),
    Sentence(
        BENCHMARKS,
        "up to {:.0f} MB for all-gathers and {:.0f} MB for reduce-scatters",
        lambda: [OPTIONS[option] / (1 << 20) for option in (GATHER, SCATTER)],
    ),
    Sentence(
        BENCHMARKS,
        "all {:.0f} tests of one GPU passed",
        lambda: (int(SUITE["tests"]["summary"].split()[0]),),
    ),
    Sentence(
        BENCHMARKS,
        "Four unrolled layers of Llama-2-7B in COAT compile in {:.1f} s",
        lambda: (SUITE["stacks"]["compile_seconds"]["COAT"],),
    ),
    Sentence(
        BENCHMARKS,
        "compiles in {:.0f} s the first time, and in {:.1f} s when JAX's compilation cache has it",
        lambda: (SUITE["llama2_7b"]["compile_seconds"], SUITE["llama2_7b"]["warm"]),
    ),
    Sentence(
        BENCHMARKS,
        "took {:.2f} ms with FP32 parameters, {:.2f} ms with BF16 ones and {:.2f} ms where these "
        "are rounded stochastically",
        lambda: tuple(SUITE["optimizer"]["ms"].values()),
    ),
    Sentence(
        BENCHMARKS,
        "One seed, {:.0f} steps of batch {:.0f} x {:.0f}: {:.0f} million tokens, {:.2f} epochs",
        lambda: (
            *(of("training_curves")["settings"][key] for key in ("steps", "batch", "sequence")),
            tokens() / 1e6,
            epochs(),
        ),
    ),
    Sentence(
        BENCHMARKS,
        "COAT is {:.2f} times as fast as BF16, and {:.2f} times as fast as torchao's tensorwise "
        "FP8, the fastest other one in this run.",
        lambda: (ratio("ms", BF16_LAYER, COAT_LAYER), ratio("ms", layer(TENSORWISE), COAT_LAYER)),
    ),
    Sentence(
        BENCHMARKS,
        "COAT is {:.2f} to {:.2f} times as fast as BF16 (the paper:",
        lambda: speed_up("coat_jax COAT", "coat_jax BF16"),
    ),
    Sentence(
        BENCHMARKS,
        "and {:.2f} to {:.2f} times as fast as torchao's tensorwise FP8.",
        lambda: speed_up("coat_jax COAT", TENSORWISE),
    ),
    Sentence(
        BENCHMARKS,
        "JAX's holds {:.2f} U in BF16, {:.2f} in COAT and {:.2f} in COAT_LEAN, torch's {:.2f} U in "
        "BF16, compiled, and {:.2f} with torchao's tensorwise FP8.",
        lambda: [
            unit(name, "allocated")
            for name in ("BF16", "COAT", "COAT_LEAN", "torch BF16, compiled", TENSORWISE)
        ],
    ),
    Sentence(
        BENCHMARKS,
        "with FP32 gradients `fused_fp8_adamw` takes {:.2f} ms",
        lambda: (step("coat fused_fp8_adamw", "float32", "float32")["ms"],),
    ),
    Sentence(
        BENCHMARKS,
        "takes {:.2f} times as long as its matrix products alone on one GPU, and {:.2f} times on "
        "two",
        lambda: (over_products(1), over_products(2)),
    ),
    Sentence(
        BENCHMARKS,
        "A compressed step takes {:.0f} to {:.0f} times as long as optax's",
        lambda: faster_in_place("compressed"),
    ),
    Sentence(
        BENCHMARKS,
        "the error {:.1f} times smaller than dynamic range expansion to FP8 with the same "
        "rounding at b2 = 0.95, and {:.1f} times at b2 = 0.999.",
        lambda: [accumulated_over_ours(b2, "dynamic range expansion", [STOCHASTIC]) for b2 in B2S],
    ),
    Sentence(
        BENCHMARKS,
        "is {:.1f} times ours at b2 = 0.95 and {:.1f} times at b2 = 0.999, each with its "
        "better rounding",
        lambda: [accumulated_over_ours(b2, "bitsandbytes' code", ROUNDINGS) for b2 in B2S],
    ),
    Sentence(
        BENCHMARKS,
        "makes the error {:.2f} times smaller than plain FP8 in groups does (the paper: {:.2f} "
        "times); with embedding and head alone it is {:.2f} times.",
        lambda: (
            error_over_ours(0.95, "layers", "E4M3 / E4M3"),
            of("optimizer_error")["paper"]["E4M3 / E4M3"]
            / of("optimizer_error")["paper"]["E4M3+E / E4M3+E"],
            error_over_ours(0.95, "embedding and head", "E4M3 / E4M3"),
        ),
    ),
    Sentence(
        BENCHMARKS,
        "its error is {:.2f} of it at b2 = 0.95 and {:.2f} at b2 = 0.999",
        lambda: [error_over_ours(b2, "layers", "DE8 / DE8") for b2 in (0.95, 0.999)],
    ),
    Sentence(
        BENCHMARKS,
        "is found in {:.0f} us by reading the tensor",
        lambda: (case("group_scaling", columns=11008)["ms"]["full pass"] * 1e3,),
    ),
    Sentence(
        BENCHMARKS,
        "and in {:.0f} us from maxima of groups",
        lambda: (case("group_scaling", columns=11008)["ms"]["group maxima"] * 1e3,),
    ),
    Sentence(
        BENCHMARKS,
        "make the error of a norm's input {:.0f} % smaller, and that of the recomputed activation "
        "{:.0f} %, for {:.0f} % more bytes.",
        lambda: (exact_scale_gains("x"), exact_scale_gains("a"), 100 * (1.25 / 1.0625 - 1)),
    ),
    # docs/loss.md
    Sentence(
        LOSS,
        "A Llama of 40 million parameters reads {:.1f} million tokens of source code and "
        "documentation, once",
        lambda: (loss_tokens(),),
    ),
    Sentence(
        LOSS,
        "differ only in rounding end {:.3f} % apart (standard deviation). A mean over four seeds "
        "within {:.3f} % of zero",
        lambda: (loss_floor(), loss_band()),
    ),
    Sentence(
        LOSS,
        "runs of different seeds end between {:.1f} % below BF16 and {:.1f} % above it",
        loss_extremes,
    ),
    Sentence(
        LOSS,
        "With this start, all of COAT ends {:+.2f} % ± {:.2f} above BF16",
        lambda: loss_of("coat_after_bf16"),
    ),
    Sentence(
        LOSS,
        "At 124 million parameters and {:.1f} million tokens",
        lambda: (tokens_124m(),),
    ),
    Sentence(
        LOSS,
        "COAT ends {:+.2f} % above BF16, and {:+.2f} % if the first quarter is in BF16; the two "
        "baselines are {:.2f} % apart",
        loss_124m,
    ),
    Sentence(
        LOSS,
        "`fp8_muon` costs {:+.2f} % ± {:.2f} in training loss, and {:+.2f} % ± {:.2f} held out",
        loss_of_muon,
    ),
    Sentence(
        LOSS,
        "parameters and gradients in BF16 cost {:+.2f} % ± {:.2f} with corrections",
        lambda: loss_of("params_24_bits"),
    ),
    # docs/architecture.md
    Sentence(
        ARCHITECTURE,
        "Two moments take 2 (1 + 5/{:.0f}) = {:.2f} bytes a parameter",
        lambda: (GROUP_SIZE, MOMENTS),
    ),
    Sentence(
        ARCHITECTURE,
        "It moves {:.1f} bytes per FP32 parameter with BF16 gradients, where AdamW with FP32 "
        "moments moves {:.0f}.",
        lambda: (4 + 4 + 2 + 2 * MOMENTS, 4 + 4 + 2 + 2 * 8),
    ),
    Sentence(
        ARCHITECTURE,
        "one byte per 16 values: {:.2f} bytes a value. An exact scale takes {:.3f} bytes with BF16 "
        "and {:.2f} with FP32.",
        lambda: [1 + scale / 16 for scale in (1, 2, 4)],
    ),
    Sentence(
        ARCHITECTURE,
        "makes the error of a norm's input {:.0f} % smaller and that of the recomputed activation "
        "{:.0f} %",
        lambda: (exact_scale_gains("x"), exact_scale_gains("a")),
    ),
    Sentence(ARCHITECTURE, "compute capability {:.1f} or newer", lambda: (CAPABILITY,)),
    # docs/ideas.md
    Sentence(IDEAS, "The group spans {:.1f} binades.", lambda: (group()["binades"],)),
    Sentence(
        IDEAS,
        "With k = {:.2f} the group fills the whole format, and a binade of the group has {:.2f} "
        "times",
        lambda: (group()["k"], group()["k"]),
    ),
    Sentence(
        IDEAS,
        "in equal ratios: {:.0f} to a binade in this group",
        lambda: (group()["codes a binade of a logarithm"],),
    ),
    Sentence(
        IDEAS,
        "is off by {:.1f} % with one scale, by {:.1f} % with dynamic range expansion and by "
        "{:.1f} %",
        lambda: [100 * error for error in group()["errors of m / sqrt(v)"].values()],
    ),
    Sentence(IDEAS, "Both moments together take {:.2f} bytes a parameter", lambda: (MOMENTS,)),
    Sentence(
        "docs/optimizers.md",
        "On one H200 a step of Llama-2-7B takes {:.1f} % longer this way, with gradients released, "
        "and {:.0f} % longer without",
        lambda: (slower(BOTH), slower(OFFLOADED)),
    ),
    Sentence(
        "docs/training.md",
        "a step of Llama-2-7B takes {:.1f} % longer this way than with the moments on the GPU; "
        "without "
        "released gradients it takes {:.0f} % longer",
        lambda: (slower(BOTH), slower(OFFLOADED)),
    ),
    Sentence(
        "docs/optimizers.md",
        "stores that momentum as 8-bit integers, {:.2f} bytes per parameter",
        lambda: (MOMENTS / 2,),
    ),
    # docs/layers.md
    *(
        Sentence(LAYERS, f"| `coat.{row} | {{:.1f}} U |", lambda name=name: (unit(name),))
        for row, name in {
            "BF16` | as they come | as they come | q, k, v, o": "BF16",
            "FP8_LINEAR` | FP8 | as they come | q, k, v, o": "FP8_LINEAR",
            "COAT` | FP8 | FP8 in blocks of 16 | q, k, v, o": "COAT",
            "COAT_LEAN` | FP8 | FP8 in blocks of 16 | q, k, v, o in FP8": "COAT_LEAN",
            # Keeps what COAT keeps.
            "COAT_PAPER` | FP8 | FP8 in blocks of 16 | q, k, v, o": "COAT",
        }.items()
    ),
    Sentence(
        LAYERS,
        "its hidden width is {:.2f} times the width",
        lambda: (Sizes().hidden / Sizes().width,),
    ),
    Sentence(LAYERS, "saves it in FP8 ({:.2f} U)", lambda: ((1 + 1 / 16) / 2,)),
    Sentence(LAYERS, "before Ada (compute capability {:.1f})", lambda: (CAPABILITY,)),
    # configs
    *(
        Sentence(f"coat_jax/configs/{name}.py", pattern, lambda name=name: peaks(name))
        for name, pattern in {
            "llama_124m": "takes {:.1f} GB in COAT and {:.1f} in BF16",
            "llama_350m": "takes {:.1f} GB in COAT and {:.1f} in BF16",
            "olmo_1b": "takes {:.1f} GB of one GPU in COAT and {:.1f} in BF16",
            "llama2_7b": "takes {:.1f} GB of each in COAT and {:.1f} in BF16",
            "llama2_13b": "takes {:.1f} GB of each in COAT and {:.1f} in BF16",
            "llama_30b": "takes {:.1f} GB of each in COAT and {:.1f} in BF16",
        }.items()
    ),
    Sentence(
        "coat_jax/configs/llama_124m.py",
        "{:.0f} million tokens of source code ({:.2f} epochs, one seed) on an H200 ended at a "
        "held-out loss of {:.3f} in COAT, and of {:.3f} in BF16",
        lambda: (tokens() / 1e6, epochs(), *held_out()[::-1]),
    ),
    Sentence(
        "coat_jax/configs/llama2_7b.py",
        "take {:.1f} bytes a parameter with COAT, of which {:.0f} are the FP32 sum of the "
        "gradients of several microbatches; without accumulation they take {:.1f}.",
        lambda: (
            bytes_a_parameter("parameters", "gradients", "optimizer"),
            4,
            bytes_a_parameter("parameters", "gradients", "optimizer") - 4,
        ),
    ),
    Sentence(
        "coat_jax/configs/llama2_7b.py",
        "COAT takes {:.1f} GB at a batch of 10 and trains {:,.0f} tokens a second, BF16 {:.1f} GB "
        "and {:,.0f} (",
        lambda: (
            COAT_10["peak"] / GB,
            COAT_10["tokens_per_second"],
            BF16_10["peak"] / GB,
            BF16_10["tokens_per_second"],
        ),
    ),
    Sentence(
        "coat_jax/configs/llama_tiny.py",
        "Llama of {:.1f} million parameters",
        lambda: (millions(PRESETS["tiny"]),),
    ),
    Sentence(
        "coat_jax/configs/olmo_1b.py",
        "OLMo with {:.1f} billion parameters",
        lambda: (millions(PRESETS["olmo_1b"]) / 1e3,),
    ),
    Sentence(
        FORMATS,
        "INT8 comes second, {:.1f} bits behind, and E3M4 third",
        lambda: (bits("normal", "E2M5") - bits("normal", "INT8"),),
    ),
    Sentence(
        FORMATS,
        "E4M3 gets {:.1f} to {:.1f} bits right, whatever the data",
        lambda: [
            of_all(bits(numbers, "E4M3") for numbers in of("format_sqnr")["bits"])
            for of_all in (min, max)
        ],
    ),
    Sentence(
        FORMATS,
        "INT8 ranges from {:.1f} bits down to {:.1f} if one number in a thousand is a "
        "hundred times larger",
        lambda: (
            bits("uniform", "INT8"),
            bits("normal, 0.1 % a hundred times larger", "INT8"),
        ),
    ),
    Sentence(
        FORMATS,
        "loses {:.1f} bits against the best range, with Laplace data {:.1f}",
        lambda: (lost_at_the_maximum("normal"), lost_at_the_maximum("Laplace")),
    ),
    Sentence(
        FORMATS,
        "to {:.2f} bits.",
        lambda: (of("format_sqnr")["largest deviation from the paper"],),
    ),
    Sentence(
        FORMATS,
        "on {:,} weighted random numbers theory and measurement differ by at most {:.2f} %",
        lambda: (
            of("format_sqnr")["weighted samples"],
            100 * of("format_sqnr")["largest deviation"],
        ),
    ),
    Sentence(
        FORMATS,
        "Student's t with 4 degrees, INT8 gets {:.1f} bits right instead of {:.1f}",
        lambda: (
            bits("Student t, 4 degrees", "INT8", "tensor"),
            bits("Student t, 4 degrees", "INT8"),
        ),
    ),
    *stability.SENTENCES,
]
