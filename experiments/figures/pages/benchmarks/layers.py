"""A layer in docs/benchmarks.md: time, what it saves, a scale; memory of configs; compilation."""

from experiments import gpu_suite
from experiments.figures.compare import Figure, Given, Sentence, Table
from experiments.figures.measured import throughput
from experiments.figures.measured.files import GB, bold, case, of, ratio
from experiments.figures.measured.layers import (
    TENSORWISE,
    layer,
    longer_in_int8,
    longer_in_suite,
    unit,
)
from experiments.figures.pages.reasons import ARITHMETIC, OTHER_RUN, PAPER, SETTING

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


def of_the_suite() -> tuple[int]:
    """The tests that passed, where the suite found nothing wrong, as the page says."""
    figures = of("gpu_suite")
    if missed := gpu_suite.failed(figures):
        raise ValueError(f"docs/benchmarks.md does not say what the suite missed: {missed}.")
    return (int(figures["tests"]["summary"].split()[0]),)


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


def stacks_of(key: str, *names: str) -> tuple[float, ...]:
    """Figures of gpu_suite's four layers in these precisions."""
    return tuple(of("gpu_suite")["stacks"][key][name] for name in names)


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
    Given("The 12 tests that need several GPUs", SETTING),
    Sentence(
        "all {:.0f} tests passed, and all bounds of its benchmark held",
        of_the_suite,
    ),
    Sentence(
        "Four unrolled layers of Llama-2-7B in COAT compile in {:.1f} s, and in {:.1f} s when "
        "JAX's compilation cache has them",
        lambda: stacks_of("compile_seconds", "COAT") + stacks_of("warm", "COAT"),
    ),
    Sentence(
        "The step of `llama2_7b:one_gpu` compiled in {:.1f} s the first time, and in {:.1f} s from",
        lambda: tuple(of("gpu_suite")["llama2_7b"][key] for key in ("compile_seconds", "warm")),
    ),
    Sentence(
        "takes {:.1f} s of the first and {:.1f} s of the second",
        lambda: tuple(
            of("gpu_suite")["llama2_7b"][key] for key in ("lower_seconds", "warm_lower_seconds")
        ),
    ),
    Sentence(
        "COAT's steps took {:.1f} to {:.1f} s the first time, and {:.1f} to {:.1f} s from the "
        "cache",
        lambda: throughput.compilation(keeps_everything=True),
    ),
    Sentence(
        "they took {:.1f} to {:.1f} s and {:.1f} to {:.1f} s",
        lambda: throughput.compilation(keeps_everything=False),
    ),
    Sentence(
        "`make gpu` fails above {:.0f} s and {:.0f} s", lambda: (gpu_suite.COLD, gpu_suite.WARM)
    ),
    Given(
        "on others, the same program took 28.2 s and 7.0 s, and 34.0 s and 9.9 s. Beside other "
        "measurements that were compiling it took 35.2 s and 10.8 s.",
        "results/gpu_suite.json of commits a05655c, dd7ade6 and 99134a9",
    ),
    Given(
        "the step there took 1.34, 1.06 and 1.09 ms, and the layers 82.5, 82.2 and 86.4 ms, so "
        "that `COAT_INT8` took 4.7 % more.",
        "results/gpu_suite.json of commit dd7ade6",
    ),
    Given(
        "took 36.4 to 48.0 s the first time, and 8.4 to 12.7 s from the cache, and 4 of 7 of them "
        "missed both limits.",
        "results/gpu_suite.json of commits 57a6a61, 04154f2, 365d7af, ad894af, a8445a9 and before",
    ),
    Sentence(
        "took {:.2f} ms with FP32 parameters, {:.2f} ms with BF16 ones and {:.2f} ms where these "
        "are rounded stochastically",
        lambda: tuple(of("gpu_suite")["optimizer"]["ms"].values()),
    ),
    Sentence(
        "The four layers take {:.1f} ms, forward and backward; in `COAT_PAPER`, which rounds saved "
        "activations to nearest, they take {:.1f} ms, and in `COAT_INT8` {:.1f} ms",
        lambda: stacks_of("ms", "COAT", "COAT_PAPER", "COAT_INT8"),
    ),
    Sentence("{:.1f} % more than in COAT.", longer_in_suite),
]
