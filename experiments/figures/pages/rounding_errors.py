"""The figures of docs/rounding_errors.md: of moments, bounds and saved activations."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.accumulated_error import B2S, OURS, STORAGES, in_8_bits, leads
from experiments.figures.compare import Figure, Given, Page, Sentence, Table
from experiments.figures.measured import bounds, loss_study
from experiments.figures.measured.files import bold, of
from experiments.figures.measured.layers import (
    dx_beside_outliers,
    exact_scale_gains,
    exact_scales_in_our_bytes,
)
from experiments.figures.measured.package import MOMENTS
from experiments.figures.pages.reasons import AIM, OTHER_RUN, SETTING
from experiments.muon_error import STANDARD, orthogonalized_in_e4m3

PARTS = ("layers", "embedding and head")
ROUNDINGS = STOCHASTIC, NEAREST = "v stochastic", "v to nearest"
EXPANDED = "E4M3+E / E4M3+E"  # dynamic range expansion, as the paper has it
PLAIN = "E4M3 / E4M3"
DEFAULT, DEFAULT_TO_NEAREST = (f"{OURS}, {rounding}" for rounding in ROUNDINGS)
EXPANDED_V_STOCHASTIC = f"dynamic range expansion, {STOCHASTIC}"
FLASH_OPTIM_TO_NEAREST = f"FlashOptim's codes, {NEAREST}"
ACCUMULATED_IN = [f"{part}, b2 = {b2}" for part in PARTS for b2 in B2S]
MUON_PARTS = ("q, k, v, gate, up", "o, down")
SCALED = "8-bit integers, columns scaled"
CODERS = {
    "dynamic range expansion to E4M3": EXPANDED,
    "E4M3, one scale per group": PLAIN,
    "bitsandbytes' code": "DE8 / DE8",
    "m: bitsandbytes' code expanded, v: E4M3 expanded": "DE8+E / E4M3+E",
}


def accumulated(b2: float, part: str, storage: str) -> float:
    """The error at the end of accumulated_error."""
    return of("accumulated_error")["at the end"][f"b2 = {b2}"][storage][part]


def accumulated_over_ours(b2: float, storage: str, roundings: Sequence[str]) -> float:
    """The error in the layers over that of coat_jax as shipped, with the best of the roundings."""
    ours = accumulated(b2, "layers", DEFAULT)
    return min(accumulated(b2, "layers", f"{storage}, {r}") for r in roundings) / ours


def accumulated_error() -> list[list[str]]:
    """The error at the end by format, rounding, b2 and part."""
    rows = [["moments stored with", *ACCUMULATED_IN]]
    for name in STORAGES:
        rows.append([bold(cell, name == DEFAULT) for cell in (name, *_accumulated(name))])
    return rows


def accumulated_leads() -> list[list[str]]:
    """Formats with one part changed: their bytes, and the error at the end by b2 and part."""
    in_bytes = dict.fromkeys((DEFAULT, EXPANDED_V_STOCHASTIC), 2 * in_8_bits())
    in_bytes |= {name: lead.bytes for name, lead in leads(B2S[0]).items()}
    rows = [["moments stored with", "bytes per parameter", *ACCUMULATED_IN]]
    for name, size in in_bytes.items():
        cells = name, f"{size:.2f}", *_accumulated(name)
        rows.append([bold(cell, name == DEFAULT) for cell in cells])
    return rows


def over_default(*names: str) -> list[float]:
    """The errors of formats in the layers over that of the default, by format and b2."""
    return [
        accumulated(b2, "layers", name) / accumulated(b2, "layers", DEFAULT)
        for name in names
        for b2 in B2S
    ]


def over_expanded_moments(part: str, name: str) -> list[float]:
    """The error of dynamic range expansion with one part changed over that without, by b2."""
    changed, before = f"dynamic range expansion, {name}", EXPANDED_V_STOCHASTIC
    return [accumulated(b2, part, changed) / accumulated(b2, part, before) for b2 in B2S]


def smaller_groups(size: int) -> tuple[float, float, float]:
    """By how many percent groups of this size decrease the error at each b2, and add bytes."""
    at_b2s = (100 - 100 * over for over in over_default(f"{OURS}, groups of {size}"))
    return (*at_b2s, 100 * (in_8_bits(size) / in_8_bits() - 1))


def better_than_default() -> tuple[float]:
    """The one other format of the default's size that is better at one b2: its error at the other.

    Raises if there are more, or others.
    """
    small = [name for name, lead in leads(B2S[0]).items() if lead.bytes <= 2 * in_8_bits()]
    better = [
        (name, b2)
        for name in (*STORAGES, *small)
        for b2, over in zip(B2S, over_default(name), strict=True)
        if over < 1
    ]
    if better != [(DEFAULT_TO_NEAREST, B2S[0])]:
        raise ValueError(f"Better than the default: {better}. See docs/rounding_errors.md.")
    return (over_default(DEFAULT_TO_NEAREST)[1],)


def _accumulated(name: str) -> list[str]:
    return [_rounded(accumulated(b2, part, name)) for part in PARTS for b2 in B2S]


def of_muon(momentum: str, part: str) -> float:
    """The error of Muon's update at the end of muon_error, in percent."""
    return 100 * of("muon_error")["at the end"]["muon"][momentum][part]


def muon_error() -> list[list[str]]:
    """The error of Muon's update by storage of the momentum and by part."""
    rows = [["momentum", *MUON_PARTS]]
    for name in of("muon_error")["at the end"]["muon"]:
        cells = [f"{of_muon(name, part):.1f} %" for part in MUON_PARTS]
        rows.append([bold(cell, name == SCALED) for cell in (name, *cells)])
    return rows


def gain_of_columns() -> tuple[float]:
    """How many times smaller the error is if columns are scaled, where they differ more."""
    readers = MUON_PARTS[0]
    return (of_muon("8-bit integers", readers) / of_muon(SCALED, readers),)


def largest_tolerated() -> tuple[float]:
    """The singular value above which a step of Newton-Schulz increases it."""
    a, b, c = STANDARD
    limit = math.sqrt((-b + math.sqrt(b**2 - 4 * c * (a - 1))) / (2 * c))
    x = jax.random.normal(jax.random.key(0), (256, 1024))
    if jnp.linalg.norm(orthogonalized_in_e4m3(x), 2) <= limit:
        raise ValueError(
            f"Products in E4M3 no longer exceed {limit:.2f}: see docs/rounding_errors.md."
        )
    return (limit,)


def _rounded(number: float) -> str:
    """Two digits, without an exponent."""
    return np.format_float_positional(float(f"{number:.2g}"), trim="-")


def over_expanded(b2: float, part: str, coder: str) -> float:
    """A case of optimizer_error: its error over that of dynamic range expansion."""
    table = of("optimizer_error")[f"b2 = {b2}"][part]
    return table[coder]["error"] / table[EXPANDED]["error"]


def optimizer_error() -> list[list[str]]:
    """Errors over that of dynamic range expansion, by format, b2 and part."""
    columns = [(part, b2) for part in PARTS for b2 in B2S]
    rows = [["both moments", *(f"{part}, b2 = {b2}" for part, b2 in columns)]]
    for name, coder in CODERS.items():
        rows.append([name, *(f"{over_expanded(b2, part, coder):.2f}" for part, b2 in columns)])
    return rows


def plain_over_expanded() -> tuple[float, float, float]:
    """The error of plain FP8: in the layers, in the paper, and in embedding and head."""
    paper = of("optimizer_error")["paper"]
    layers, rest = (over_expanded(0.95, part, PLAIN) for part in PARTS)
    return layers, paper[PLAIN] / paper[EXPANDED], rest


def int8_and_ours(channels_larger: int) -> list[float]:
    """Errors of a norm's output in INT8 and in our format, in percent, by granularity."""
    found = of("granularity")["outliers"]["every token"][str(channels_larger)]
    return [100 * found[way]["n"] for way in ("1 x 16, INT8", "1 x 16, 2^n (ours)")]


FIGURES: list[Figure] = [
    Sentence(
        "makes the error of its updates {:.1f} times smaller in the matrices that read the "
        "residual stream",
        gain_of_columns,
    ),
    Given("At b2 = 0.999 the rounding matters more", SETTING),
    Table("accumulated_error", accumulated_error),
    Sentence(
        "the error {:.1f} times smaller than dynamic range expansion to FP8 with the same "
        "rounding at b2 = 0.95, and {:.1f} times at b2 = 0.999.",
        lambda: [accumulated_over_ours(b2, "dynamic range expansion", [STOCHASTIC]) for b2 in B2S],
    ),
    Sentence(
        "is {:.1f} times ours at b2 = 0.95 and {:.1f} times at b2 = 0.999, with the better of its "
        "two roundings",
        lambda: [accumulated_over_ours(b2, "bitsandbytes' code", ROUNDINGS) for b2 in B2S],
    ),
    Table("accumulated_leads", accumulated_leads),
    Sentence(
        "m alone has {:.2f} of the default's error at b2 = 0.95 and {:.2f} at b2 = 0.999; v alone "
        "has {:.2f} and {:.2f}. So most of the error is m's at b2 = 0.95 and v's at b2 = 0.999",
        lambda: over_default(f"{OURS}, m alone", f"{OURS}, v alone"),
    ),
    Sentence(
        "groups of 64 make the error {:.0f} % (b2 = 0.95) and {:.0f} % (b2 = 0.999) smaller for "
        "{:.1f} % more bytes, and groups of 32 make it {:.0f} % and {:.0f} % smaller for {:.1f} % "
        "more bytes.",
        lambda: [*smaller_groups(64), *smaller_groups(32)],
    ),
    Sentence(
        "makes the error in the layers {:.2f} (b2 = 0.95) and {:.2f} (b2 = 0.999) of what it is "
        "with sixteenths, for {:.1f} % more bytes.",
        lambda: [
            *over_expanded_moments("layers", "k in FP32"),
            100 * (leads(B2S[0])["dynamic range expansion, k in FP32"].bytes / MOMENTS - 1),
        ],
    ),
    Sentence(
        "never becomes zero, the error is {:.2f} and {:.2f} of what it is now in the layers, and "
        "{:.2f} and {:.2f} in embedding and head.",
        lambda: [n for part in PARTS for n in over_expanded_moments(part, "small m never zero")],
    ),
    Sentence(
        "at b2 = 0.95. Its error at b2 = 0.999 is {:.0f} times the default's. FlashOptim",
        better_than_default,
    ),
    Sentence(
        "FlashOptim's codes need {:.2f} bytes. In the layers their error is {:.2f} of the "
        "default's at b2 = 0.95 and {:.0f} times the default's at b2 = 0.999; with v rounded "
        "stochastically, it is {:.2f} and {:.1f} times the default's.",
        lambda: [
            leads(B2S[0])[FLASH_OPTIM_TO_NEAREST].bytes,
            *over_default(FLASH_OPTIM_TO_NEAREST, f"FlashOptim's codes, {STOCHASTIC}"),
        ],
    ),
    Sentence("the default costs {:+.2f} % ± {:.2f},", lambda: loss_study.cost("moments")),
    Sentence(
        "ends [{:.2f} % ± {:.2f} below](loss.md#the-papers-recipe) FP32 moments",
        lambda: loss_study.below("moments_paper"),
    ),
    Table("muon_error", muon_error),
    Sentence("columns differ more, this makes the error {:.1f} times smaller", gain_of_columns),
    Sentence(
        "Its products are in BF16, which adds {:.1f} %",
        lambda: (of_muon("FP32, products in BF16", MUON_PARTS[0]),),
    ),
    Sentence(
        "twice as fast, would add {:.1f} %",
        lambda: (of_muon("FP32, products in E4M3", MUON_PARTS[0]),),
    ),
    Sentence("a singular value above {:.2f} grows", largest_tolerated),
    Given("With a division by 1.1 in each step", SETTING),
    Given("ended 0.5 % below the baselines", OTHER_RUN),
    Given("its limit, 1.3 times the time of its products", AIM),
    Table("optimizer_error", optimizer_error),
    Sentence(
        "makes the error {:.2f} times smaller than plain FP8 in groups does (the paper: {:.2f} "
        "times); in embedding and head alone it is {:.2f} times.",
        plain_over_expanded,
    ),
    Sentence(
        "its error is {:.2f} of that of dynamic range expansion at b2 = 0.95 and {:.2f} at b2 = "
        "0.999",
        lambda: [over_expanded(b2, "layers", "DE8 / DE8") for b2 in B2S],
    ),
    Given("are also made 100 or 1000 times larger", SETTING),
    Table("bound_looseness", bounds.rows),
    Sentence(
        "up to {:.0f} times the largest magnitude in the trained model, and up to {:,.0f} times "
        "with outliers",
        bounds.looseness_of_gradients,
    ),
    Given("with columns up to 100 times larger", SETTING),
    Sentence(
        "If they are 1000 times larger, {:.0f} % of the other values are subnormal or zero instead "
        "of {:.0f} %, and their error grows by {:.0f} %.",
        bounds.extreme_norm,
    ),
    Sentence(
        "make the error of a norm's input {:.0f} % smaller, and that of the recomputed activation "
        "{:.0f} %, for {:.0f} % more bytes.",
        lambda: (exact_scale_gains("x"), exact_scale_gains("a"), 100 * (1.25 / 1.0625 - 1)),
    ),
    Sentence(
        "Blocks of 64 with FP32 scales take the {:.4f} bytes a value of ours, and make the two "
        "errors {:.0f} % and {:.0f} % smaller.",
        exact_scales_in_our_bytes,
    ),
    Given("With three channels a hundred times larger", SETTING),
    Sentence(
        "error is {:.1f} % in our blocks, {:.1f} % in blocks of 64 and {:.2f} % in blocks of 16 "
        "with FP32 scales",
        dx_beside_outliers,
    ),
    Sentence(
        "cost in loss](loss.md#the-cost-of-each-part) is {:.2f} % ± {:.2f} in COAT",
        lambda: loss_study.above("muon_products", "muon_coat"),
    ),
    Sentence(
        "has an error of {:.1f} % in a norm's output, where E4M3 with a power of two has {:.1f} %.",
        lambda: int8_and_ours(channels_larger=1),
    ),
    Sentence(
        "channels are made a hundred times larger, the error of the others is {:.1f} % in INT8 and "
        "{:.1f} % in E4M3",
        lambda: int8_and_ours(channels_larger=100),
    ),
]

PAGE = Page("docs/rounding_errors.md", FIGURES)
