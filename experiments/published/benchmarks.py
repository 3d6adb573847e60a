"""Speed and memory of training, layers, what they save, and optimizer steps: docs/benchmarks.md."""

import re
import statistics
from collections.abc import Iterable
from typing import Any

from experiments.published.results import GB, bold, case, of, record

LAYER = "coat_jax COAT"
TENSORWISE = "torchao float8 tensorwise, compiled"
OTHERS = {"bf16": "coat_jax BF16", "torchao": TENSORWISE}  # to compare a layer with
ADAMW = {"coat": "coat fused_fp8_adamw", "optax": "optax.adamw"}
SAVED_BY = {  # the columns, by the parts of activation_memory
    "by norm, q, k, v": "norm, query, key, value, rotation",
    "by attention": "attention, output",
    "by the MLP": "norm, gate, up, activation, down",
}
NOW = "fused_fp8_adamw", "in_place(fp8_adamw)"  # its name in results, and its name today
OURS = {LAYER, "coat fused_fp8_adamw", "coat fp8_muon"}  # in bold
BF16_GRADIENTS = ("coat", "optax")  # torch's optimizers need gradients in the parameters' dtype
SINGLE, MODEL = "one_leaf", "llama2_7b"  # the parameters of optimizer_step
STEPS = [(SINGLE, "float32"), (SINGLE, "bfloat16"), (MODEL, "float32"), (MODEL, "bfloat16")]


def training() -> list[list[str]]:
    """Llama-2-7B on one GPU."""
    rows = [["precision", "batch", "", "tokens/s", "peak memory, GB"]]
    for one in of("training_throughput")["cases"]:
        where = {"offloaded": "moments in host memory", "released": "gradients released"}
        options = ", ".join(words for option, words in where.items() if one[option])
        rows.append([_precision(one), str(one["batch"]), options, *_speed(one)])
    return rows


def larger_model() -> list[list[str]]:
    """Llama-2-13B on an H100 and on an H200, by batch and by where the moments are."""
    rows = [["GPU", "batch", "moments", "tokens/s", "peak memory, GB"]]
    for gpu, name in (("H100", "llama2_13b"), ("H200", "llama2_13b_h200")):
        cases = of(f"training_throughput_{name}")["cases"]
        for one in sorted(cases, key=lambda one: (one["batch"], one["offloaded"])):
            moments = "in host memory" if one["offloaded"] else "on the GPU"
            rows.append([gpu, str(one["batch"]), moments, *_speed(one)])
    return rows


def several_gpus() -> list[list[str]]:
    """Llama-2-7B, sharded over several GPUs."""
    rows = [["GPUs", "precision", "batch", "tokens/s", "peak memory, GB", "speed of a GPU"]]
    for name in ("4_gpus", "2_gpus_beside_one", "4_gpus_beside_one"):
        for one in of(f"training_throughput_{name}")["cases"]:
            share = f"{one['efficiency']:.3f}" if "efficiency" in one else ""
            cells = [_precision(one), str(one["batch"]), *_speed(one), share]
            rows.append([str(one["devices"]), *cells])
    return rows


def eight_gpus() -> list[list[str]]:
    """What steps on eight GPUs take of each, and what each receives, as compiled."""
    rows = [["model", "mesh", "batch", "", "memory, GB", "gathered, GB", "summed, GB"]]
    for one in of("eight_gpus")["cases"]:
        sizes = (f"{one[key] / GB:.1f}" for key in ("peak", "gathered", "summed"))
        mesh = one["mesh"].replace("=", " ").replace(",", ", ")
        rows.append([one["model"], mesh, str(one["batch"]), _precision(one), *sizes])
    return rows


def small_model() -> list[list[str]]:
    """llama_124m on one GPU."""
    rows = [["precision", "batch", "tokens/s", "peak memory, GB"]]
    for one in of("training_throughput_llama_124m_sequence_1024")["cases"]:
        rows.append([_precision(one), str(one["batch"]), *_speed(one)])
    return rows


def communication() -> list[list[str]]:
    """Two GPUs by options of XLA and CUDA, after the same GPUs alone."""
    measured = of("communication")
    rows = [["options", "ms a step", "speed of a GPU", "exposed, ms"]]
    alone = statistics.mean(one["ms"] for one in measured["alone"])
    rows.append(["each GPU alone", f"{alone:.1f}", "1.000", ""])
    for one in measured["cases"]:
        # NCCL's kernels also run while a GPU waits for the other, so of the one that waits less.
        exposed = min(timeline["exposed_ms"] for timeline in one["timeline"].values())
        cells = f"{one['ms']:.1f}", f"{one['efficiency']:.3f}", f"{exposed:.1f}"
        rows.append([one["name"], *cells])
    return rows


def layer() -> list[list[str]]:
    """The time of one more layer of Llama-2-7B, and what it saves."""
    units = of("activation_memory")["units"]
    rows = [["", "forward, ms", "backward, ms", "both, ms", "saved, U", *SAVED_BY]]
    for one in of("layer_speed")["cases"]:
        times = (f"{one[key]:.1f}" for key in ("forward_ms", "backward_ms", "ms"))
        parts = units[one["layer"].removeprefix("coat_jax ")]
        sizes = (f"{parts[part]:.2f}" for part in ("the layer", *SAVED_BY.values()))
        rows.append(_ours(one["layer"], [*times, *sizes]))
    return rows


def layer_sizes() -> list[list[str]]:
    """The time of a layer by its width and its batch."""
    columns = {"BF16": OTHERS["bf16"], "COAT": LAYER, "torchao tensorwise": TENSORWISE}
    rows = [["width", "batch x sequence", *columns]]
    for (width, batch, sequence), ms in _times_by_size().items():
        times = (bold(f"{ms[way]:.2f}", way == LAYER) for way in columns.values())
        rows.append([str(width), f"{batch} x {sequence}", *times])
    return rows


def layer_speed_up(over: str) -> str:
    """How many times as fast a layer of Llama-2-7B is in COAT."""
    return f"{_layer_ms(OTHERS[over]) / _layer_ms(LAYER):.2f}"


def layer_speed_up_at(end: str, over: str) -> str:
    """The same, at the size where it is least ("min") or most ("max")."""
    ratios = [ms[OTHERS[over]] / ms[LAYER] for ms in _times_by_size().values()]
    return f"{min(ratios) if end == 'min' else max(ratios):.2f}"


def configs() -> list[list[str]]:
    """The memory that each shipped config takes of each GPU."""
    rows = [["config", "GPUs", "sequences on each", "COAT, GB", "BF16, GB"]]
    for name, variants in of("config_memory").items():
        one = variants["COAT"]
        peaks = (f"{variants[v]['peak'] / GB:.1f}" for v in ("COAT", "BF16"))
        rows.append([name, str(one["gpus"]), f"{one['rows']} x {one['sequence']}", *peaks])
    return rows


def versions() -> list[list[str]]:
    """What gpu_suite found with the newest releases, and with earlier ones."""
    files = "gpu_suite", "gpu_suite_jax_0_11"
    columns = [_of_suite(of(name)) for name in files]
    releases = [record(name)["parents"]["versions"] for name in files]
    names = (", ".join(f"{p} {v[p]}" for p in ("jax", "jax-triton", "triton")) for v in releases)
    return [["", *names], *([row, *(column[row] for column in columns)] for row in columns[0])]


def optimizer_steps() -> list[list[str]]:
    """Steps over one array and over Llama-2-7B, with parameters in FP32 and in BF16."""
    columns = [f"{size}, {dtype}" for size in ("2^28", "7B") for dtype in ("FP32", "BF16")]
    rows = [["ms", *columns, "extra, 2^28", "extra, 7B", "bytes"]]
    measured = of("optimizer_step")["cases"]
    names = dict.fromkeys(one["optimizer"] for one in measured if one["model"] == MODEL)
    for name in sorted(names, key=lambda name: not name.startswith("coat")):
        found = [_step(name, model, params) for model, params in STEPS]
        times = ["" if one is None else f"{one['ms']:.2f}" for one in found]
        memory = [_size(max(_of_all("extra_bytes", part))) for part in (found[:2], found[2:])]
        states = _of_all("state_bytes_per_param", found[2:])
        state = " / ".join(dict.fromkeys(f"{size:.2f}" for size in states))
        rows.append(_ours(name, [*times, *memory, state]))
    return rows


def adamw_ms(whose: str) -> str:
    """The time of an AdamW step over one array of FP32 parameters."""
    step = _step(ADAMW[whose], SINGLE, "float32")
    assert step is not None
    return f"{step['ms']:.2f}"


def muon_steps() -> list[list[str]]:
    """Steps of Muon on one GPU and on two."""
    rows = [[""]]
    for gpus in ("one GPU", "two GPUs"):
        rows[0] += [f"{gpus}, ms", "over products", "extra, GB"]
    rows[0].append("bytes")
    for name in [one["case"] for one in of("muon_step")["cases"]]:
        both = [case(file, case=name) for file in ("muon_step", "muon_step_2_gpus")]
        cells = [
            cell
            for one in both
            for cell in (f"{one['ms']:.0f}", f"{one['over_products']:.2f}", _gb(one))
        ]
        state = both[0].get("state_bytes_per_param")
        rows.append(_ours(name, [*cells, "" if state is None else f"{state:.2f}"]))
    return rows


def _ours(name: str, cells: Iterable[str]) -> list[str]:
    return [bold(cell, name in OURS) for cell in (name.replace(*NOW), *cells)]


def _precision(one: dict[str, Any]) -> str:
    return bold(one["precision"], one["precision"] == "COAT")


def _speed(one: dict[str, Any]) -> list[str]:
    return [f"{one['tokens_per_second']:,.0f}", f"{one['peak'] / GB:.1f}"]


def _layer_ms(name: str) -> float:
    return case("layer_speed", layer=name)["ms"]


def _times_by_size() -> dict[tuple[int, int, int], dict[str, float]]:
    times: dict[tuple[int, int, int], dict[str, float]] = {}
    for one in of("layer_table")["cases"]:
        size = one["width"], one["batch"], one["sequence"]
        times.setdefault(size, {})[one["layer"]] = one["ms"]
    return times


def _of_suite(found: dict[str, Any]) -> dict[str, str]:
    """The rows of the table of versions, from one run of the suite."""
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


def _step(optimizer: str, model: str, params: str) -> dict[str, Any] | None:
    grads = "bfloat16" if optimizer.startswith(BF16_GRADIENTS) else params
    wanted = {"optimizer": optimizer, "model": model, "params": params, "grads": grads}
    cases = [one for one in of("optimizer_step")["cases"] if "ms" in one]
    return next((one for one in cases if wanted.items() <= one.items()), None)


def _of_all(key: str, steps: list[dict[str, Any] | None]) -> list[float]:
    return [step[key] for step in steps if step is not None]


def _size(count: float) -> str:
    """Bytes in a unit that a reader takes in at a glance."""
    if count < 2**20:
        return f"{count / 2**10:.0f} KiB" if count >= 2**10 else f"{count:.0f} bytes"
    return f"{count / 2**20:,.0f} MiB"


def _gb(one: dict[str, Any]) -> str:
    return f"{one['extra_bytes'] / GB:.1f}" if "extra_bytes" in one else ""
