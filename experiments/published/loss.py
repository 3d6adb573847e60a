"""What FP8 costs in loss: docs/loss.md, docs/loss_study.md and README.

A cost is an arm's loss above that of the baselines of its seeds, in percent. Tables write it as

    +0.18 ± 0.19 (8)        mean over seeds, half of its 95 % interval, number of seeds

and in bold if it is significant: p < 0.05 by Holm's method, over all arms of a study.
"""

import functools
import math
from dataclasses import replace
from typing import NamedTuple

from experiments.fine_tuning import study as fine_tuning
from experiments.fine_tuning.ways import USUAL
from experiments.loss_study.arm import Settings
from experiments.loss_study.arms import SIZES
from experiments.loss_study.conditions import baselines_of, conditions_of, trains_by_muon
from experiments.loss_study.study import PREPARING, STUDY
from experiments.published.results import FOLDER, bold, of
from experiments.row_files import Row
from experiments.study import statistics
from experiments.study.command import STARTING
from experiments.study.statistics import Comparison, Effect

SIGNIFICANT = 0.05


class Study(NamedTuple):
    """Runs that can be compared: the same model, optimizer and text."""

    name: str
    size: str
    steps: int
    muon: bool = False


STUDIES = {
    "adamw": Study("40 M, AdamW", "40M", 400),
    "adamw_longer": Study("40 M, AdamW", "40M", 2400),
    "muon": Study("40 M, Muon", "40M", 400, muon=True),
    "muon_longer": Study("40 M, Muon", "40M", 2400, muon=True),
    "124m_adamw": Study("124 M, AdamW", "124M", 600),
    "124m": Study("124 M, Muon", "124M", 600, muon=True),
    "124m_longer": Study("124 M, Muon", "124M", 2250, muon=True),
    "360m": Study("360 M, Muon", "350M", 300, muon=True),
    "experts": Study("experts, AdamW", "experts", 400),
}
TUNED = "tuned"  # fine-tuning, at 40M

# The table of presets: what trains, and its arm in each of these studies.
COLUMNS = ["adamw", "muon", "124m", "124m_longer", TUNED]
PRESETS = {
    "`COAT_BF16_FORWARD`": (
        "coat_bf16_forward",
        *["muon_coat_bf16_forward"] * 3,
        "coat_bf16_forward",
    ),
    "`COAT_INT8`": ("coat_int8", *["muon_coat_int8"] * 3, "coat_int8"),
    "`COAT`": ("coat", *["muon_coat"] * 3, "coat"),
    "`COAT_LEAN`": ("coat_lean", *["muon_coat_lean"] * 3, "coat_lean"),
    "`FP8_LINEAR`": ("products", *["muon_products"] * 3, "products"),
    "`COAT_PAPER`": ("coat_rounded_forward", *["muon_coat_paper"] * 3, "coat_paper"),
}
BY_MUON = 2  # of these columns

# The table of parts: what changes, in which study, from which arm ("" is BF16) to which.
PARTS = [
    ("**forward products in FP8**", "muon", "muon_coat_bf16_forward", "muon_coat"),
    ("... in the projections to q, k and v alone", "muon", "", "muon_qkv_rounded"),
    ("... in the output projection alone", "muon", "", "muon_out_rounded"),
    ("... in gate and up alone", "muon", "", "muon_up_rounded"),
    ("... in down alone", "muon", "", "muon_down_rounded"),
    ("**forward products in INT8**", "muon", "muon_coat_bf16_forward", "muon_coat_int8"),
    ("**backward products in FP8**", "muon", "muon_saved", "muon_coat_bf16_forward"),
    ("activations saved in FP8", "muon", "", "muon_saved"),
    ("... in E3M2, 6 bits", "muon", "", "muon_saved_norms_and_hidden_e3m2"),
    ("... in E2M1, 4 bits", "muon", "", "muon_saved_norms_and_hidden_e2m1"),
    ("... in NVFP4", "muon", "", "muon_saved_norms_and_hidden_nvfp4"),
    (
        "attention's operands saved in FP8, too", "muon", "muon_coat_bf16_forward",
        "muon_coat_lean_bf16_forward",
    ),
    (
        "... and rounded in the forward pass", "muon", "muon_coat_bf16_forward",
        "muon_coat_lean_bf16_forward@6",
    ),
    ("activations rounded to nearest", "adamw", "saved", "saved_nearest"),
    (
        "`COAT` with BF16 forward products, first quarter", "muon", "muon_coat",
        "muon_coat_after_bf16_forward",
    ),
    ("... last twentieth", "muon", "muon_coat", "muon_coat_before_bf16_forward"),
    ("products summed in FP32, in `COAT`", "adamw", "coat", "coat_exact_sums"),
    ("stochastic operands, backward, in `COAT`", "adamw", "coat", "coat_stochastic_backward"),
    ("AdamW's moments in 8 bits", "adamw", "", "moments"),
    ("`fp8_muon`'s states in 8 bits", "muon", "", "fp8_muon"),
    ("the paper's moments, in `COAT_PAPER`", "adamw", "coat_rounded_forward", "paper"),
    ("BF16 parameters, rounded stochastically", "adamw", "", "params_bf16_stochastic"),
    ("BF16 parameters, 8-bit corrections", "adamw", "", "params_24_bits"),
]  # fmt: skip

# The table of fine-tuning: which operands are rounded, and the arm that rounds them.
OPERANDS = {
    "inputs of forward products": "inputs_rounded",
    "weights": "weights_rounded",
    "inputs and gradients of backward products": "backward_rounded",
    "all, and saved activations: `COAT`": "coat",
}


@functools.cache
def runs(study: str) -> list[Row]:
    """The runs of a study."""
    if study == TUNED:
        return [way for row in _tuned() for way in fine_tuning.ways_of(row)]
    _, size, steps, muon = STUDIES[study]
    wanted = size, steps, SIZES[size].settings.learning_rate, {}, muon
    (found,) = (rows for rows in _groups() if wanted == _conditions(rows[0]))
    return found


def _conditions(row: Row) -> tuple[object, ...]:
    settings, optimizer = row["settings"], row["definition"]["optimizer"]
    steps, rate = settings["steps"], settings["learning_rate"]
    return row["size"], steps, rate, optimizer, trains_by_muon(row)


@functools.cache
def _groups() -> list[list[Row]]:
    return [*conditions_of(STUDY.read([FOLDER / "loss_study.json"])).values()]


@functools.cache
def _tuned() -> list[Row]:
    rows = fine_tuning.STUDY.read([FOLDER / "fine_tuning.json"])
    return [row for row in rows if row["size"] == "40M"]


@functools.cache
def effects(study: str, held_out: str = "", above: str = "") -> Comparison:
    """What each arm of a study costs.

    Args:
        study: a key of `STUDIES`, or "tuned".
        held_out: the precision in which held-out loss is evaluated; training loss without it.
        above: the arm to compare with; the baselines without it.
    """
    rows = runs(study)
    loss = statistics.held_out(held_out) if held_out else statistics.final
    return statistics.compare(rows, [above] if above else baselines_of(rows), loss)


def mean(study: str, arm: str) -> str:
    """What an arm costs in training loss, in percent."""
    return _percent(effects(study).effects[arm].mean, _digits(study))


def half(study: str, arm: str) -> str:
    """Half of the interval of this cost."""
    return f"{100 * effects(study).effects[arm].half:.{_digits(study)}f}"


def apart(study: str) -> str:
    """The standard deviation between two baselines of a seed, in percent."""
    return f"{100 * effects(study).noise.apart:.2g}"


def cell(study: str, arm: str, held_out: str = "") -> str:
    """What an arm costs, as tables write it; see above."""
    found = effects(study, held_out).effects
    if arm not in found:
        return ""
    effect = found[arm]
    return bold(_written(effect, _digits(study)), effect.holm < SIGNIFICANT)


def presets() -> list[list[str]]:
    """What each preset, and each part of it, costs and saves."""
    rows = [["", "layer, ms", "saved, U", *map(_title, COLUMNS)]]
    rows.append(["`BF16`: noise floor", *_layer("BF16"), *map(apart, COLUMNS)])
    for name, arms in PRESETS.items():
        rows.append([name, *_layer(name.strip("`")), *map(cell, COLUMNS, arms)])
    return rows


def brief() -> list[list[str]]:
    """The costs that README has."""
    chosen = ["muon", "124m"]
    rows = [["", *map(_title, chosen)]]
    for name in ("`COAT_BF16_FORWARD`", "`COAT_INT8`", "`COAT`"):
        rows.append([name, *map(cell, chosen, PRESETS[name][1:3])])
    return [*rows, ["two BF16 runs apart", *map(apart, chosen)]]


def by_part() -> list[list[str]]:
    """What single changes cost, relative to the same seeds without them."""
    rows = [["what changes", "training loss, %"]]
    for name, study, before, after in PARTS:
        if effect := effects(study, above=before).effects.get(after):
            optimizer = "" if STUDIES[study].muon else " (AdamW)"
            rows.append([name + optimizer, _written(effect, _digits(study))])
    return rows


def tuned() -> list[list[str]]:
    """What rounding operands costs in fine-tuning, and how much of it stays in the weights."""
    rows = [["rounded", "training", "held out, evaluated in BF16"]]
    for name, arm in OPERANDS.items():
        rows.append([name, cell(TUNED, arm), cell(TUNED, arm, "bf16")])
    return rows


def tuned_presets() -> list[list[str]]:
    """What presets cost in fine-tuning."""
    arms = {"8-bit moments alone": "moments"}
    known = effects(TUNED).effects
    arms |= {name: arm for name, (*_, arm) in PRESETS.items() if arm in known}
    rows = [["", "training", "held out", "held out, evaluated in BF16"]]
    for name, arm in arms.items():
        rows.append([name, *(cell(TUNED, arm, held_out) for held_out in ("", "own", "bf16"))])
    return rows


def sooner() -> list[list[str]]:
    """How much sooner than BF16 each preset reaches BF16's loss, in a small run and in a large one.

    A preset needs more tokens, because each brings it a little less far, and less time for each.
    """
    rows = [["", "speed of a layer"]]
    rows[0] += [f"{run} run, {what}" for run in ("small", "large") for what in ("tokens", "speed")]
    known = effects("124m").effects
    for name, arms in PRESETS.items():
        if (arm := arms[BY_MUON]) in known:
            faster, cells = layer_ms("BF16") / layer_ms(name.strip("`")), []
            for falls in (_measured_fall(), _fall_of_chinchilla(7e9, 2e12)):
                more = math.exp(known[arm].mean / falls)
                cells += [f"{more:.3f}", f"{faster / more:.2f}"]
            rows.append([name, f"{faster:.2f}", *cells])
    return rows


def _measured_fall() -> float:
    """By how much the log of BF16's loss falls for each unit of the log of the tokens."""
    logs = []
    for study in ("124m", "124m_longer"):
        baselines = [row for row in runs(study) if row["arm"] in baselines_of(runs(study))]
        losses = [statistics.final(row) for row in baselines]
        logs.append((math.log(float(tokens(study))), math.log(sum(losses) / len(losses))))
    (few, high), (many, low) = logs
    return (high - low) / (many - few)


def _fall_of_chinchilla(parameters: float, tokens: float) -> float:
    """The same by the law of Hoffmann et al., 2022: L = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28."""
    of_tokens = 410.7 / tokens**0.28
    return 0.28 * of_tokens / (1.69 + 406.4 / parameters**0.34 + of_tokens)


def with_outliers(form: str) -> str:
    """What a format costs a small network whose inputs have columns 30 times as large as others."""
    name, seeds = form.replace("_", " "), of("forward_formats")["seeds"]
    costs = [math.log(one[name]["outliers of 30"] / one["exact"]) for one in seeds]
    return _percent(sum(costs) / len(costs), 2)


def tokens(study: str) -> str:
    """How many tokens a run reads, in millions."""
    settings = runs(study)[0]["settings"]
    return f"{settings['steps'] * settings['batch'] * settings['sequence'] / 1e6:.1f}"


def resolution() -> list[list[str]]:
    """How many seeds, and minutes of an H200, resolve 0.1 %."""
    rows = [["runs", "two BF16 runs apart, %", "COAT's interval, %", "seeds", "minutes"]]
    for name, study, arm in (
        ("fine-tuning", TUNED, "coat"),
        ("from scratch, Muon", "muon", "muon_coat"),
        ("from scratch, AdamW", "adamw", "coat"),
    ):
        effect = effects(study).effects[arm]
        # Three seeds at least, for two baselines in each: `docs/loss_study.md`.
        seeds = max(statistics.seeds_for(0.001, effect), 3)
        interval = f"± {half(study, arm)} ({effect.seeds})"
        rows.append([name, apart(study), interval, str(seeds), f"{_minutes(study, seeds):.0f}"])
    return rows


def _minutes(study: str, seeds: int) -> float:
    """How long two baselines and an arm take, by the estimate of `--plan`."""
    if study == TUNED:
        trained = fine_tuning.cost_of(Settings(**_tuned()[0]["settings"]), USUAL)
    else:
        size = SIZES[STUDIES[study].size]
        trained = 3 * replace(size.settings, steps=STUDIES[study].steps).tokens
    return (PREPARING + STARTING + seeds * trained / SIZES["40M"].tokens_per_second) / 60


def layer_ms(preset: str) -> float:
    """The time of a layer of Llama-2-7B, forward and backward: a fourth of a stack of four."""
    stacks = of("gpu_suite_presets")["stacks"]
    return stacks["ms"][preset] / stacks["layers"]


def layer_units(preset: str) -> float:
    """What a layer of Llama-2-7B saves, in units of its input in BF16."""
    return of("activation_memory")["units"][preset]["the layer"]


def _layer(preset: str) -> list[str]:
    return [f"{layer_ms(preset):.1f}", f"{layer_units(preset):.1f}"]


def _written(effect: Effect, digits: int) -> str:
    interval = "" if math.isnan(effect.half) else f" ± {100 * effect.half:.{digits}f}"
    return f"{_percent(effect.mean, digits)}{interval} ({effect.seeds})"


def _percent(value: float, digits: int) -> str:
    """With its sign, and never -0.00."""
    return f"{round(100 * value, digits) + 0.0:+.{digits}f}"


def _name(study: str) -> str:
    return "40 M, fine-tuning" if study == TUNED else STUDIES[study].name


def _title(study: str) -> str:
    """The name of a study, and its tokens where another one has the same name."""
    alike = study != TUNED and [one.name for one in STUDIES.values()].count(_name(study)) > 1
    return f"{_name(study)}, {tokens(study)} M tokens" if alike else _name(study)


def _digits(study: str) -> int:
    return 3 if study == TUNED else 2
