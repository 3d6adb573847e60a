"""The tables of README and docs/benchmarks.md, from results files."""

from typing import Any

from experiments.communication import TRAINERS
from experiments.figures import stability
from experiments.figures.pages import Table
from experiments.figures.results import (
    FOLDER,
    GB,
    accumulated,
    error_over_ours,
    example,
    layer,
    loss_effects,
    muon,
    of,
)
from experiments.figures.results import parents as parents_of
from experiments.figures.results import step as step_of

Rows = list[list[str]]
BENCHMARKS = "docs/benchmarks.md"
OURS = {"coat_jax COAT", "coat fused_fp8_adamw", "coat fp8_muon"}


def bold(text: str, when: bool = True) -> str:
    """Bold where a row is ours."""
    return f"**{text}**" if when else text


def training_throughput() -> Rows:
    """Every case, by batch."""
    return _throughput(of("training_throughput")["cases"])


def training_throughput_plain() -> Rows:
    """Those that keep everything on the GPU."""
    rows = _throughput([c for c in of("training_throughput")["cases"] if not _options_of(c)])
    return [[*row[:2], *row[3:]] for row in rows]


def _throughput(cases: list[dict[str, Any]]) -> Rows:
    rows = [["precision", "batch", "", "tokens/s", "peak memory, GB"]]
    order = ["BF16", "FP8_LINEAR", "COAT", "COAT_LEAN"]
    for one in sorted(cases, key=lambda c: (order.index(c["precision"]), c["batch"])):
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


def training_curves() -> Rows:
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


def precision_ablation() -> Rows:
    """Both losses of every variant, against full precision; the other seed last."""
    variants = of("precision_ablation")["variants"]
    base = variants["full precision"]
    rows = [["", "loss, last 30 steps", "", "held out", ""]]
    for name in sorted(variants, key=lambda name: "seed" in name):
        one = variants[name]
        cells = []
        for figure in ("final", "held out"):
            change = f"{round(100 * (one[figure] / base[figure] - 1), 1) + 0.0:+.1f} %"  # no -0.0
            cells += [f"{one[figure]:.3f}", "" if one is base else change]
        rows.append([name.replace("kept activations", "saved activations"), *cells])
    return rows


def layer_speed() -> Rows:
    """Every way in the order in which it was measured."""
    rows = [["", "forward", "backward", "both"]]
    for one in of("layer_speed")["cases"]:
        name = one["layer"]
        times = (f"{layer(name)[key]:.1f}" for key in ("forward_ms", "backward_ms", "ms"))
        rows.append([bold(cell, name in OURS) for cell in (name, *times)])
    return rows


def layer_table() -> Rows:
    """A row for each size."""
    ways = {
        "BF16": "coat_jax BF16",
        "COAT": "coat_jax COAT",
        "COAT_LEAN": "coat_jax COAT_LEAN",
        "torch BF16, compiled": "torch BF16, compiled",
        "torchao tensorwise": "torchao float8 tensorwise, compiled",
    }
    times: dict[tuple[int, int, int], dict[str, float]] = {}
    for one in of("layer_table")["cases"]:
        size = one["width"], one["batch"], one["sequence"]
        times.setdefault(size, {})[one["layer"]] = one["ms"]
    rows = [["width", "batch x sequence", *ways]]
    for (width, batch, sequence), ms in times.items():
        cells = (bold(f"{ms[way]:.2f}", way in OURS) for way in ways.values())
        rows.append([str(width), f"{batch} x {sequence}", *cells])
    return rows


def activation_memory() -> Rows:
    """Every way by operator, in U; the paper's totals last."""
    units = of("activation_memory")["units"]
    operators = list(units["BF16"])
    rows = [["U", *operators]]
    for name, row in units.items():
        shown = name if name.startswith("torch") else f"coat_jax {name}"
        rows.append([shown, *(f"{row[operator]:.2f}" for operator in operators)])
    for name, total in of("activation_memory")["paper"].items():
        rows.append([f"paper: {name}", *[""] * (len(operators) - 1), f"{total:.2f}"])
    return rows


def config_memory() -> Rows:
    """The peak of each config in both precisions."""
    rows = [["config", "GPUs", "sequences on each", "COAT, GB", "BF16, GB"]]
    for name, variants in of("config_memory").items():
        one = variants["COAT"]
        peaks = (f"{variants[v]['peak'] / GB:.1f}" for v in ("COAT", "BF16"))
        rows.append([name, str(one["gpus"]), f"{one['rows']} x {one['sequence']}", *peaks])
    return rows


OPTIMIZERS = {  # the gradients of FP32 parameters
    "coat fused_fp8_adamw": "bfloat16",
    "coat fused_fp8_adamw, stochastic": "bfloat16",
    "coat fused_fp8_adamw, 24 bits": "bfloat16",
    "coat fused_fp8_adamw, 24 bits, stochastic": "bfloat16",
    "coat fp8_adamw chain": "bfloat16",
    "optax.adamw": "bfloat16",
    "torch AdamW fused": "float32",
    "torchao AdamWFp8": "float32",
    "torchao AdamW8bit": "float32",
    "bitsandbytes AdamW8bit": "float32",
}


def optimizer_step() -> Rows:
    """One array of 2^28 parameters."""
    return _steps("one_leaf")


def optimizer_step_7b() -> Rows:
    """The arrays of Llama-2-7B."""
    return _steps("llama2_7b")


def _steps(model: str) -> Rows:
    rows = [["", "FP32 parameters", "BF16 parameters", "extra memory", "state, bytes a parameter"]]
    measured = {
        (c["optimizer"], c["params"], c["grads"])
        for c in of("optimizer_step")["cases"]
        if c["model"] == model
    }
    for name, grads in OPTIMIZERS.items():
        arguments = [(name, "float32", grads), (name, "bfloat16", "bfloat16")]
        found = [step_of(*a, model=model) if a in measured else None for a in arguments]
        there = [one for one in found if one is not None]
        if there:
            states = dict.fromkeys(f"{one['state_bytes_per_param']:.2f}" for one in there)
            times = ["" if one is None else f"{one['ms']:.2f}" for one in found]
            memory = max(one["extra_bytes"] for one in there)
            cells = [name, *times, _size(memory), " / ".join(states)]
            rows.append([bold(c, name in OURS and bool(c)) for c in cells])
    return rows


def _size(count: int) -> str:
    """Bytes in a unit that a reader takes in at a glance."""
    if count < 2**20:
        return f"{count / 2**10:.0f} KiB" if count >= 2**10 else f"{count} bytes"
    return f"{count / 2**20:,.0f} MiB"


def accumulated_error() -> Rows:
    """The error at the end by format, rounding, b2 and part."""
    ends = of("accumulated_error")["at the end"]
    names, parts = ends["b2 = 0.95"], ("layers", "embedding and head")
    rows = [["moments stored with", *(f"{part}, {b2}" for part in parts for b2 in ends)]]
    for name in names:
        cells = [_rounded(accumulated(b2, part, name)) for part in parts for b2 in (0.95, 0.999)]
        ours = name == next(iter(names))
        rows.append([bold(cell, ours) for cell in (name, *cells)])
    return rows


def _rounded(number: float) -> str:
    """Two digits, without an exponent."""
    return f"{float(f'{number:.2g}'):g}"


def optimizer_error() -> Rows:
    """Errors over that of coat_jax's format, by format, b2 and part."""
    coders = {
        "dynamic range expansion to E4M3": "E4M3+E / E4M3+E",
        "E4M3, one scale per group": "E4M3 / E4M3",
        "bitsandbytes' code": "DE8 / DE8",
        "m: bitsandbytes' code expanded, v: E4M3 expanded": "DE8+E / E4M3+E",
    }
    columns = [(part, b2) for part in ("layers", "embedding and head") for b2 in (0.95, 0.999)]
    rows = [["both moments", *(f"{part}, b2 = {b2}" for part, b2 in columns)]]
    for name, coder in coders.items():
        rows.append([name, *(f"{error_over_ours(b2, part, coder):.2f}" for part, b2 in columns)])
    return rows


ARMS = {  # of loss_study, in words
    "moments": "8-bit moments",
    "products": "FP8 products",
    "products_e4m3_gradients": "FP8 products, gradients in E4M3",
    "saved": "saved activations in FP8",
    "saved_rounded_forward": "saved activations in FP8, forward pass rounded",
    "activations": "FP8 products and saved activations",
    "activations_rounded_forward": "the same, forward pass rounded (`COAT_PAPER`)",
    "activations_e4m3_gradients": "the same, gradients in E4M3",
    "activations_lean": "FP8 products and saved activations, as in `COAT_LEAN`",
    "coat": "all of COAT",
    "coat_rounded_forward": "all of COAT, forward pass rounded (`COAT_PAPER`)",
    "coat_e4m3_gradients": "all of COAT, gradients in E4M3",
    "coat_lean": "all of COAT_LEAN",
    "bf16_after_activations": "the first quarter: products and activations; then BF16",
    "activations_after_saved": "... activations only; then products too",
    "activations_after_products": "... products only; then activations too",
    "activations_after_bf16_tenth": "the first tenth: BF16; then products and activations",
    "activations_after_bf16": "the first quarter: BF16; then products and activations",
    "coat_after_bf16": "the first quarter: BF16; then all of COAT",
    "params_24_bits": "no FP8: BF16 gradients, BF16 parameters with corrections (24 bits)",
    "params_bf16_stochastic": "no FP8: BF16 gradients, BF16 parameters, rounded stochastically",
    "fp8_muon": "8-bit states, BF16 products",
}


def communication() -> Rows:
    """Every case, after one GPU alone."""
    measured = of("communication")
    header = ["options", "ms a step", "share of one GPU's speed"]
    rows = [[*header, "compute, ms", "communication, ms", "exposed, ms"]]
    rows.append(["one GPU alone", f"{measured['one_gpu']['ms']:.1f}", "1.000", "", "", ""])
    kinds = "compute_ms", "communication_ms", "exposed_ms"
    for case in measured["cases"]:
        shown = [case["name"], f"{case['ms']:.1f}", f"{case['efficiency']:.3f}"]
        shown = [bold(text, case["name"] == TRAINERS) for text in shown]
        rows.append([*shown, *(f"{case['timeline']['0'][kind]:.1f}" for kind in kinds)])
    return rows


def loss_study_40m() -> Rows:
    """What each part of FP8 costs in loss at 40 million parameters."""
    return _loss_study("40M", 5e-4)


def loss_study_muon() -> Rows:
    """The same for Muon."""
    return _loss_study("40M", 5e-4, muon=True)


def _loss_study(size: str, learning_rate: float, *, muon: bool = False) -> Rows:
    training = loss_effects(size, learning_rate, muon=muon).effects
    held_out = loss_effects(size, learning_rate, muon=muon, held_out=True).effects
    rows = [["what changes", "arm", "seeds", "training loss, last 10 %", "held-out loss", "Holm p"]]
    order = [arm for arm in ARMS if arm in training]
    others = [arm for arm in training if arm not in ARMS and "@" not in arm]  # of other versions
    for arm in [*order, *sorted(others)]:
        effects = training[arm], held_out[arm]
        costs = (f"{percent(one.mean)} % ± {100 * one.half:.2f}" for one in effects)
        holm = f"{training[arm].holm:.2g}"
        rows.append([ARMS.get(arm, ""), f"`{arm}`", str(training[arm].seeds), *costs, holm])
    return rows


def percent(effect: float) -> str:
    """A relative difference in percent, with its sign; never -0.00."""
    return f"{round(100 * effect, 2) + 0.0:+.2f}"


def parents() -> Rows:
    """What each results file says of itself."""
    rows = [["results", "script", "commit", "hardware", "date"]]
    for name in sorted(path.stem for path in FOLDER.glob("*.json")):
        made = parents_of(name)
        hardware = made["hardware"]
        several = f"{hardware['devices']} x " if hardware["devices"] > 1 else ""
        script = made["script"].removeprefix("experiments/").removesuffix(".py")
        rows.append(
            [
                f"[{name}](../experiments/results/{name}.json)",
                f"`{script}`",
                f"`{made['commit'][:9]}`",
                several + hardware["device"].replace("cpu", "CPU"),
                made["date"],
            ]
        )
    return rows


def muon_step() -> Rows:
    """Every way on one GPU and on two, as multiples of the products alone."""
    rows = [["", "one GPU, ms", "over products", "two GPUs, ms", "over products", "extra memory"]]
    rows[0].append("state, bytes a parameter")
    for one in of("muon_step")["cases"]:
        name, both = one["case"], (one, muon(one["case"], gpus=2))
        times = [cell for c in both for cell in (f"{c['ms']:.0f}", f"{c['over_products']:.2f}")]
        memory = f"{one['extra_bytes'] / GB:.1f} GB" if "extra_bytes" in one else ""
        state = one.get("state_bytes_per_param")
        cells = [name, *times, memory, "" if state is None else f"{state:.2f}"]
        rows.append([bold(c, name in OURS and bool(c)) for c in cells])
    return rows


def in_place_step() -> Rows:
    """Every transformation in each of the three ways: its time and its state."""
    ways = {"optax": "optax", "in_place": "in_place", "compressed": "in_place, compressed"}
    rows = [["", *(f"{way}, {unit}" for way in ways.values() for unit in ("ms", "bytes"))]]
    rows[0].append("compressed, extra memory")
    cases = {(c["case"], c["way"]): c for c in of("in_place_step")["cases"]}
    for name in dict.fromkeys(name for name, _ in cases):
        found = [cases[name, way] for way in ways]
        cells = [f"{c[f]:.2f}" for c in found for f in ("ms", "state_bytes_per_param")]
        rows.append([f"`{name}`", *cells, f"{found[-1]['extra_bytes'] / 2**30:.1f} GiB"])
    return rows


EXAMPLES = {
    "flax_nnx": "Flax NNX, AdamW",
    "flax_linen": "Flax Linen, AdamW",
    "flax_lora": "Flax NNX with LoRA, base weights in FP8",
}


def examples_memory() -> Rows:
    """Every example without coat_jax and with it."""
    rows = [["", "peak, GB", "with coat_jax", "optimizer state, GB", "with", "ms a step", "with"]]
    for name, words in EXAMPLES.items():
        both = example(name, ours=False), example(name, ours=True)
        cells = [f"{c[kind] / GB:.2f}" for kind in ("peak_bytes", "state_bytes") for c in both]
        rows.append([words, *cells, *(f"{c['ms']:.1f}" for c in both)])
    return rows


def compress_table() -> Rows:
    """Losses of every transformation, as it is and compressed."""
    rows = [
        ["transformation", "leaves in FP8", "loss, FP32", "compressed", "loss, BF16", "compressed"]
    ]
    for name, row in of("compress_table")["trained"].items():
        losses = [
            row[dtype][which]
            for dtype in ("float32", "bfloat16")
            for which in ("loss", "compressed_loss")
        ]
        shown = ["diverges" if loss is None else f"{loss:.3g}" for loss in losses]
        rows.append([name, str(row["compressed_leaves"]), *shown])
    return rows


def format_sqnr() -> Rows:
    """The bits that are right in each format, by theory; the best of a row bold."""
    bits = of("format_sqnr")["bits"]
    formats = ["INT8", "E2M5", "E3M4", "E4M3", "E5M2"]
    rows = [["numbers", *formats]]
    for name, cells in bits.items():
        found = [cells[f]["theory"] for f in formats]
        rows.append([name, *(bold(f"{b:.2f}", b == max(found)) for b in found)])
    return rows


TABLES = [
    Table("README.md", "training_throughput", training_throughput_plain),
    Table(BENCHMARKS, "training_throughput", training_throughput),
    Table(BENCHMARKS, "training_curves", training_curves),
    Table(BENCHMARKS, "precision_ablation", precision_ablation),
    Table(BENCHMARKS, "layer_speed", layer_speed),
    Table(BENCHMARKS, "layer_table", layer_table),
    Table(BENCHMARKS, "activation_memory", activation_memory),
    Table(BENCHMARKS, "config_memory", config_memory),
    Table(BENCHMARKS, "communication", communication),
    Table(BENCHMARKS, "optimizer_step", optimizer_step),
    Table(BENCHMARKS, "optimizer_step_7b", optimizer_step_7b),
    Table(BENCHMARKS, "accumulated_error", accumulated_error),
    Table(BENCHMARKS, "optimizer_error", optimizer_error),
    Table("docs/optimizers.md", "compress_table", compress_table),
    Table(BENCHMARKS, "muon_step", muon_step),
    Table(BENCHMARKS, "in_place_step", in_place_step),
    Table("docs/examples.md", "examples_memory", examples_memory),
    Table("docs/loss.md", "loss_study_40m", loss_study_40m),
    Table("docs/loss.md", "loss_study_muon", loss_study_muon),
    Table("docs/stability.md", "stability_5m", stability.failures_5m),
    Table("docs/stability.md", "stability_losses_5m", stability.losses_5m),
    Table("docs/formats.md", "format_sqnr", format_sqnr),
    Table(BENCHMARKS, "parents", parents),
]
