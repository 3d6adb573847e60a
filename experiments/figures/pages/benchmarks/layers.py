"""A layer in docs/benchmarks.md: time, what it saves, a scale; memory of configs; compilation."""

import re
from typing import Any

from experiments import gpu_suite
from experiments.figures.compare import Figure, Given, Sentence, Table
from experiments.figures.measured.files import GB, bold, case, of, parents, ratio
from experiments.figures.measured.layers import (
    TENSORWISE,
    layer,
    longer_in_int8,
    longer_in_suite,
    unit,
)
from experiments.figures.pages.reasons import ARITHMETIC, OTHER_RUN, PAPER

OURS = "coat_jax COAT"
WAYS = {
    "BF16": "coat_jax BF16",
    "COAT": OURS,
    "COAT_LEAN": "coat_jax COAT_LEAN",
    "torch BF16, compiled": "torch BF16, compiled",
    "torchao tensorwise": TENSORWISE,
}


def layer_speed() -> list[list[str]]:
    """Every way in the order in which it was measured."""
    rows = [["", "forward", "backward", "both"]]
    for one in of("layer_speed")["cases"]:
        name = one["layer"]
        times = (f"{layer(name)[key]:.1f}" for key in ("forward_ms", "backward_ms", "ms"))
        rows.append([bold(cell, name == OURS) for cell in (name, *times)])
    return rows


def versions() -> list[list[str]]:
    """What gpu_suite found with the newest releases, and with earlier ones."""
    files = "gpu_suite", "gpu_suite_jax_0_11"
    columns = [_of_suite(of(name)) for name in files]
    releases = [parents(name)["versions"] for name in files]
    names = (", ".join(f"{p} {v[p]}" for p in ("jax", "jax-triton", "triton")) for v in releases)
    return [["", *names], *([row, *(column[row] for column in columns)] for row in columns[0])]


def _of_suite(found: dict[str, Any]) -> dict[str, str]:
    """The rows of the table, from one run of the suite."""
    stacks, optimizer, start = (found[key] for key in ("stacks", "optimizer", "llama2_7b"))
    return {
        "tests that passed": _passed(found["tests"]["summary"]),
        **{f"four layers in {name}": f"{ms:.1f}" for name, ms in stacks["ms"].items()},
        **{f"AdamW, 2^28 parameters, {name}": f"{ms:.2f}" for name, ms in optimizer["ms"].items()},
        "four layers in COAT, compilation": f"{stacks['compile_seconds']['COAT']:.1f}, warm "
        f"{stacks['warm']['COAT']:.1f}",
        "Llama-2-7B's step, compilation": f"{start['compile_seconds']:.1f}, warm "
        f"{start['warm']:.1f}",
    }


def _passed(summary: str) -> str:
    """As in "615 of 617", from pytest's last line."""
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed)", summary)}
    return f"{counts['passed']} of {sum(counts.values())}"


def times_by_size() -> dict[tuple[int, int, int], dict[str, float]]:
    """The milliseconds of every way, by width, batch and sequence."""
    times: dict[tuple[int, int, int], dict[str, float]] = {}
    for one in of("layer_table")["cases"]:
        size = one["width"], one["batch"], one["sequence"]
        times.setdefault(size, {})[one["layer"]] = one["ms"]
    return times


def layer_table() -> list[list[str]]:
    """A row for each size."""
    rows = [["width", "batch x sequence", *WAYS]]
    for (width, batch, sequence), ms in times_by_size().items():
        cells = (bold(f"{ms[way]:.2f}", way == OURS) for way in WAYS.values())
        rows.append([str(width), f"{batch} x {sequence}", *cells])
    return rows


def speed_up(over: str) -> tuple[float, float]:
    """How many times as fast COAT is as another way, at least and at most over the sizes."""
    ratios = [ms[over] / ms[OURS] for ms in times_by_size().values()]
    return min(ratios), max(ratios)


def activation_memory() -> list[list[str]]:
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


def allocated() -> list[float]:
    """What the allocators hold for a layer, in U."""
    names = "BF16", "COAT", "COAT_LEAN", "torch BF16, compiled", TENSORWISE
    return [unit(name, "allocated") for name in names]


def config_memory() -> list[list[str]]:
    """The peak of each config in both precisions."""
    rows = [["config", "GPUs", "sequences on each", "COAT, GB", "BF16, GB"]]
    for name, variants in of("config_memory").items():
        one = variants["COAT"]
        peaks = (f"{variants[v]['peak'] / GB:.1f}" for v in ("COAT", "BF16"))
        rows.append([name, str(one["gpus"]), f"{one['rows']} x {one['sequence']}", *peaks])
    return rows


def maximum_us(how: str) -> tuple[float]:
    """Microseconds in which the largest magnitude of a tensor is found."""
    return (case("group_scaling", columns=11008)["ms"][how] * 1e3,)


FIGURES: list[Figure] = [
    Sentence(
        "A layer is {:.2f} times as fast as in BF16, and {:.2f} times as fast as in torchao's FP8",
        lambda: [ratio("ms", layer(way), layer(OURS)) for way in (WAYS["BF16"], TENSORWISE)],
    ),
    Sentence(
        "A layer saves {:.2f} U for its backward pass, where BF16 saves {:.2f}",
        lambda: (unit("COAT"), unit("BF16")),
    ),
    Given("in another run 1.02 to 1.06 times as fast as in TransformerEngine's", OTHER_RUN),
    Table("layer_speed", layer_speed),
    Sentence(
        "COAT is {:.2f} times as fast as BF16, and {:.2f} times as fast as torchao's tensorwise "
        "FP8, the fastest other library in this run.",
        lambda: [ratio("ms", layer(way), layer(OURS)) for way in (WAYS["BF16"], TENSORWISE)],
    ),
    Sentence("A layer takes {:.1f} % longer in COAT_INT8 than in COAT", longer_in_int8),
    Given(
        "TransformerEngine-JAX 2.19 was not in this run. On the same layer, in another run on an "
        "H200, it took 21.8 to 22.0 ms with current scaling and 21.3 to 22.0 ms with delayed "
        "scaling. There COAT took 20.8 ms at commit cdcc93631",
        OTHER_RUN,
    ),
    Table("layer_table", layer_table),
    Sentence(
        "COAT is {:.2f} to {:.2f} times as fast as BF16 (the paper:",
        lambda: speed_up(over=WAYS["BF16"]),
    ),
    Given("(the paper: 1.44 to 1.57 on an H100)", PAPER),
    Sentence(
        "and {:.2f} to {:.2f} times as fast as torchao's tensorwise FP8.",
        lambda: speed_up(over=TENSORWISE),
    ),
    Given("1 U is the layer's input in BF16: 2 bytes x batch x", ARITHMETIC),
    Table("activation_memory", activation_memory),
    Sentence(
        "JAX's holds {:.2f} U in BF16, {:.2f} in COAT and {:.2f} in COAT_LEAN, torch's {:.2f} U in "
        "BF16, compiled, and {:.2f} with torchao's tensorwise FP8.",
        allocated,
    ),
    Sentence("takes {:.0f} us by reading the tensor", lambda: maximum_us("full pass")),
    Sentence("and {:.0f} us from the maxima of groups", lambda: maximum_us("group maxima")),
    Table("config_memory", config_memory),
    Sentence("four layers took {:.1f} % longer", longer_in_suite),
    Sentence(
        "takes more than {:.0f} s to compile, or {:.0f} s when warm",
        lambda: (gpu_suite.COLD, gpu_suite.WARM),
    ),
    Table("versions", versions),
]
