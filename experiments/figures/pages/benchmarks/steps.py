"""Steps of optimizers in docs/benchmarks.md: AdamW, Muon, any transformation in place."""

from typing import Any

from experiments.figures.compare import Figure, Given, Sentence, Table
from experiments.figures.measured.files import GB, bold, case, of
from experiments.figures.pages.reasons import ARITHMETIC

OURS = {"coat fused_fp8_adamw", "coat fp8_muon"}
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
WAYS = {"optax": "optax", "in_place": "in_place", "compressed": "in_place, compressed"}


def step(optimizer: str, params: str, grads: str, model: str = "one_leaf") -> dict[str, Any]:
    """A case of optimizer_step."""
    return case("optimizer_step", optimizer=optimizer, params=params, grads=grads, model=model)


def optimizer_step(model: str) -> list[list[str]]:
    """Every optimizer, with parameters in FP32 and in BF16."""
    rows = [["", "FP32 parameters", "BF16 parameters", "extra memory", "state, bytes a parameter"]]
    measured = {
        (c["optimizer"], c["params"], c["grads"])
        for c in of("optimizer_step")["cases"]
        if c["model"] == model
    }
    for name, grads in OPTIMIZERS.items():
        arguments = [(name, "float32", grads), (name, "bfloat16", "bfloat16")]
        found = [step(*a, model=model) if a in measured else None for a in arguments]
        there = [one for one in found if one is not None]
        if there:
            states = dict.fromkeys(f"{one['state_bytes_per_param']:.2f}" for one in there)
            times = ["" if one is None else f"{one['ms']:.2f}" for one in found]
            memory = max(one["extra_bytes"] for one in there)
            cells = [name, *times, _size(memory), " / ".join(states)]
            rows.append([bold(cell, name in OURS) for cell in cells])
    return rows


def _size(count: int) -> str:
    """Bytes in a unit that a reader takes in at a glance."""
    if count < 2**20:
        return f"{count / 2**10:.0f} KiB" if count >= 2**10 else f"{count} bytes"
    return f"{count / 2**20:,.0f} MiB"


def muon(name: str, gpus: int = 1) -> dict[str, Any]:
    """A case of muon_step."""
    return case("muon_step" if gpus == 1 else f"muon_step_{gpus}_gpus", case=name)


def muon_step() -> list[list[str]]:
    """Every way on one GPU and on two, as multiples of the products alone."""
    rows = [["", "one GPU, ms", "over products", "two GPUs, ms", "over products", "extra memory"]]
    rows[0].append("state, bytes a parameter")
    for one in of("muon_step")["cases"]:
        name, both = one["case"], (one, muon(one["case"], gpus=2))
        times = [cell for c in both for cell in (f"{c['ms']:.0f}", f"{c['over_products']:.2f}")]
        memory = f"{one['extra_bytes'] / GB:.1f} GB" if "extra_bytes" in one else ""
        state = one.get("state_bytes_per_param")
        cells = [name, *times, memory, "" if state is None else f"{state:.2f}"]
        rows.append([bold(cell, name in OURS) for cell in cells])
    return rows


def products_of_muon() -> tuple[float, float, float]:
    """Their TFLOP a step, and the TFLOP/s of each GPU, of one and of two."""
    rates = (muon("products", gpus)["flops_per_second"] / 1e12 for gpus in (1, 2))
    return of("muon_step")["flops"] / 1e12, *rates


def in_place() -> dict[tuple[str, str], dict[str, Any]]:
    """The cases of in_place_step, by transformation and way."""
    return {(c["case"], c["way"]): c for c in of("in_place_step")["cases"]}


def in_place_step() -> list[list[str]]:
    """Every transformation in each of the three ways: its time and its state."""
    rows = [["", *(f"{way}, {unit}" for way in WAYS.values() for unit in ("ms", "bytes"))]]
    rows[0].append("compressed, extra memory")
    for name in dict.fromkeys(name for name, _ in in_place()):
        found = [in_place()[name, way] for way in WAYS]
        cells = [f"{c[f]:.2f}" for c in found for f in ("ms", "state_bytes_per_param")]
        rows.append([f"`{name}`", *cells, f"{found[-1]['extra_bytes'] / 2**30:.1f} GiB"])
    return rows


def slower_when(way: str) -> tuple[float, float]:
    """How many times as long as optax's a step takes, at least and at most."""
    ms = {key: one["ms"] for key, one in in_place().items()}
    ratios = [ms[name, other] / ms[name, "optax"] for name, other in ms if other == way]
    return min(ratios), max(ratios)


FIGURES: list[Figure] = [
    Sentence(
        "An AdamW step over 2^28 FP32 parameters takes {:.2f} ms, where optax's takes {:.2f}",
        lambda: [
            step(optimizer, "float32", "bfloat16")["ms"]
            for optimizer in ("coat fused_fp8_adamw", "optax.adamw")
        ],
    ),
    Sentence(
        "With FP32 gradients `fused_fp8_adamw` takes {:.2f} ms",
        lambda: (step("coat fused_fp8_adamw", "float32", "float32")["ms"],),
    ),
    Given('"8.00 / 4.00" is the state', ARITHMETIC),
    Table("optimizer_step", lambda: optimizer_step("one_leaf")),
    Table("optimizer_step_7b", lambda: optimizer_step("llama2_7b")),
    Table("muon_step", muon_step),
    Sentence(
        "they are {:.0f} TFLOP a step, at {:.0f} TFLOP/s on one GPU and {:.0f} TFLOP/s on each of "
        "two.",
        products_of_muon,
    ),
    Sentence(
        "takes {:.2f} times as long as its matrix products alone on one GPU, and {:.2f} times on "
        "two",
        lambda: [muon("coat fp8_muon", gpus)["over_products"] for gpus in (1, 2)],
    ),
    Sentence(
        "Its extra memory is {:.1f} GB on one GPU and {:.1f} GB on each of two",
        lambda: [muon("coat fp8_muon", gpus)["extra_bytes"] / GB for gpus in (1, 2)],
    ),
    Given(
        "In an earlier run, on two H100s of another host, it took 279 ms (commit 072fd8a1a).",
        "results/muon_step_2_gpus.json of that commit",
    ),
    Table("in_place_step", in_place_step),
    Sentence(
        "A compressed step takes {:.1f} to {:.1f} times as long as optax's",
        lambda: slower_when("compressed"),
    ),
]
