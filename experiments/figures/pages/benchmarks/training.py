"""Training in docs/benchmarks.md: throughput, communication, and the older pair of losses."""

from typing import Any

from coat_jax.training.cluster.communication import OPTIONS
from experiments.communication import DEFAULTS, GATHER, PIPELINED, SCATTER, TRAINERS
from experiments.figures.compare import Figure, Given, Sentence, Table
from experiments.figures.measured import loss_study, throughput
from experiments.figures.measured.curves import epochs, tokens
from experiments.figures.measured.files import GB, bold, case, of, ratio
from experiments.figures.measured.throughput import beside_one, slower, training
from experiments.figures.pages.reasons import PAPER


def offloaded() -> tuple[float, float, float]:
    """GB that moments in host memory leave free, and how much longer a step takes, in percent."""
    freed = training("COAT", 16)["peak"] - training("COAT", 16, "offloaded")["peak"]
    return freed / GB, slower("offloaded"), slower("offloaded", "released")


def larger_model() -> tuple[float, ...]:
    """Llama-2-13B: its batch and peak in GB by where moments are, and the limit of an H100."""
    few, many = ([of("offloaded_memory")[place][i] for place in ("gpu", "host")] for i in (0, 1))
    limit = case(throughput.SMALL_MODEL, precision="COAT", batch=4)["memory"]["limit"]
    gpu, host = many
    return (
        *(gpu["batch"], gpu["sequence"], gpu["peak"] / GB),
        *(host["on_host"] / GB, host["peak"] / GB, limit / GB),
        *(few[0]["batch"], few[0]["sequence"], *(one["peak"] / GB for one in few)),
    )


def larger_model_trained() -> tuple[float, ...]:
    """Llama-2-13B: tokens a second, batch, sequence, peak in GB, and by how much XLA's differs."""
    name = "training_throughput_llama2_13b"
    figures = of(name)
    for full in figures["cases"][:2]:
        if full.get("failed") != "out of memory" or full["batch"] != 6:
            raise ValueError("Llama-2-13B fits at a batch of 6: say so in docs/benchmarks.md.")
    (one,) = (case for case in figures["cases"] if "failed" not in case)
    sizes = one["batch"], figures["sequence"]
    return (one["tokens_per_second"], *sizes, one["peak"] / GB, throughput.off_by(name))


def four_gpus() -> list[float]:
    """Tokens a second and GB of COAT and of BF16, and the ratio of each."""
    coat, bf16 = (training(precision, 8, gpus=4) for precision in ("COAT", "BF16"))
    pairs = [number for c in (coat, bf16) for number in (c["tokens_per_second"], c["peak"] / GB)]
    return [*pairs, ratio("tokens_per_second", coat, bf16), ratio("peak", bf16, coat)]


def communication() -> list[list[str]]:
    """Every case, after one GPU alone."""
    measured = of("communication")
    header = ["options", "ms a step", "share of one GPU's speed"]
    rows = [[*header, "compute, ms", "communication, ms", "exposed, ms"]]
    rows.append(["one GPU alone", f"{measured['one_gpu']['ms']:.1f}", "1.000", "", "", ""])
    kinds = "compute_ms", "communication_ms", "exposed_ms"
    for one in measured["cases"]:
        shown = [one["name"], f"{one['ms']:.1f}", f"{one['efficiency']:.3f}"]
        shown = [bold(text, one["name"] == TRAINERS) for text in shown]
        rows.append([*shown, *(f"{one['timeline']['0'][kind]:.1f}" for kind in kinds)])
    return rows


def two_gpus(options: str) -> dict[str, Any]:
    """A case of communication."""
    return case("communication", name=options)


def exposed(options: str) -> float:
    """Milliseconds of a step in which GPU 0 only communicates."""
    return two_gpus(options)["timeline"]["0"]["exposed_ms"]


def saved(options: str) -> float:
    """By how many percent a step is shorter than with the trainer's options."""
    return 100 * (1 - ratio("ms", two_gpus(options), two_gpus(TRAINERS)))


def training_curves() -> list[list[str]]:
    """The final losses, and held-out ones on the way."""
    base, ours = of("training_curves")["curves"].values()
    pairs = {"training loss, mean of the last 50 steps": (base["final"], ours["final"])}
    held_out = base["held out"]
    for step in [*list(held_out)[4::2], max(held_out, key=int)]:
        pairs[f"held-out loss after {step} steps"] = held_out[step], ours["held out"][step]
    rows = [["", "BF16, FP32 moments", "COAT", "COAT above BF16"]]
    for name, (a, b) in pairs.items():
        rows.append([name, f"{a:.4f}", f"{b:.4f}", f"{100 * (b / a - 1):+.2f} %"])
    return rows


def length_of_curves() -> tuple[float, ...]:
    """Steps, batch and sequence of those runs, their million tokens, and their epochs."""
    settings = of("training_curves")["settings"]
    sizes = (settings[key] for key in ("steps", "batch", "sequence"))
    return *sizes, tokens() / 1e6, epochs()


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
        "[released](optimizers.md#gradients-that-are-freed-in-the-backward-pass), it takes only "
        "{:.1f} % longer",
        offloaded,
    ),
    Sentence(
        "With released gradients and {:.0f} x {:.0f} tokens, a step of Llama-2-13B in COAT takes "
        "{:.1f} GB by XLA's account if the moments are on the GPU. With {:.1f} GB of them in host "
        "memory it takes {:.1f} GB, which fits in the {:.1f} GB that JAX uses of an H100 if "
        "`XLA_PYTHON_CLIENT_MEM_FRACTION` is 0.95 (by default it uses three quarters of the GPU). "
        "With {:.0f} x {:.0f} tokens the moments also fit on the GPU: the step takes {:.1f} GB "
        "there, and {:.1f} GB with moments in host memory.",
        larger_model,
    ),
    Sentence(
        "Llama-2-13B trains {:,.0f} tokens a second in COAT with {:.0f} x {:.0f} tokens and its "
        "moments on the GPU, in {:.1f} GB: XLA's account is within {:.2f} GB. With 6 x 2048 tokens "
        "it ran out of memory",
        larger_model_trained,
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
        "On two GPUs COAT trains {:,.0f} tokens a second, per GPU {:.3f} of the speed of one GPU "
        "alone; on four it trains {:,.0f}, per GPU {:.3f} of it.",
        lambda: beside_one(2) + beside_one(4),
    ),
    Sentence(
        "The {:.3f} in [the next section](#communication) is of H100s, {} layers and {} sequences",
        lambda: (
            two_gpus(TRAINERS)["efficiency"],
            of("communication")["layers"],
            of("communication")["case"].partition(":")[2],
        ),
    ),
    Sentence(
        "For each layer, a step on two GPUs takes {:.1f} ms longer than on one here, and {:.1f} ms "
        "there.",
        throughput.longer_per_layer,
    ),
    Table("training_throughput_llama_124m", throughput.small_rows),
    Sentence(
        "At a batch of 4, COAT is {:.2f} times as fast as BF16 in {:.2f} times less memory, at a "
        "batch of 32 it is {:.2f} times as fast in {:.2f} times less.",
        lambda: throughput.small(4) + throughput.small(32),
    ),
    Table("communication", communication),
    Sentence(
        "each of the two GPUs has {:.3f} of the speed of one alone; with XLA's defaults it has "
        "{:.3f}.",
        lambda: [two_gpus(options)["efficiency"] for options in (TRAINERS, DEFAULTS)],
    ),
    Sentence(
        "Of the communication, {:.1f} ms are exposed instead of {:.1f}.",
        lambda: (exposed(TRAINERS), exposed(DEFAULTS)),
    ),
    Sentence(
        "up to {:.0f} MB for all-gathers and {:.0f} MB for reduce-scatters",
        lambda: [OPTIONS[option] / (1 << 20) for option in (GATHER, SCATTER)],
    ),
    Sentence(
        "A step with still larger ones takes {:.1f} % less time.",
        lambda: (saved("scheduler, 512 MB"),),
    ),
    Sentence(
        "leave {:.1f} ms exposed, and a step takes {:.1f} % less time.",
        lambda: (exposed(PIPELINED), saved(PIPELINED)),
    ),
    Sentence(
        "one seed and {:.0f} steps of batch {:.0f} x {:.0f}: {:.0f} million tokens, {:.2f} epochs",
        length_of_curves,
    ),
    Table("training_curves", training_curves),
    Sentence("that differ only in rounding may end {:.2f} % apart", loss_study.larger_apart),
]
