"""What training on eight GPUs takes of each, and what it moves between them.

    python -m experiments.eight_gpus          with XLA's CUDA plugin; computes nothing

The steps of `training_throughput`, compiled ahead of time for H100s. A GPU receives:

    gathered    weights before they are used, and the tokens of other GPUs for its part of the
                experts: all-gather and all-to-all
    summed      gradients, and the results of experts: reduce-scatter and all-reduce

as in a ring: of an array of N bytes on n GPUs, (n - 1) / n N to gather or to scatter it, twice that
to reduce it for all.
"""

import argparse
import math
import re
from typing import Any, NamedTuple

from experiments.command import parser_of
from experiments.training_throughput import config_of, sizes_of

GPUS, SEQUENCE = 8, 2048


class Case(NamedTuple):
    """A model in two precisions."""

    model: str
    mesh: str
    batch: int
    precisions: tuple[str, ...] = ("COAT", "BF16")


CASES = (
    Case("llama2_7b", "fsdp=8", 8),
    Case("llama2_7b", "data=2,fsdp=4", 8),
    Case("llama2_7b", "fsdp=8", 16, ("COAT",)),
    Case("llama2_13b", "fsdp=8", 8),
    Case("llama_30b", "fsdp=8", 3),
    Case("olmoe_7b", "fsdp=8", 8),
    Case("olmoe_7b", "expert=8,fsdp=1", 8),
)
GATHERED, SUMMED = ("all-gather", "all-to-all"), ("reduce-scatter", "all-reduce")
COLLECTIVE = re.compile(rf"= (.*) ({'|'.join((*GATHERED, *SUMMED))})(-start)?\((.*)")
BYTES = {"s8": 1, "u8": 1, "s32": 4, "u32": 4, "pred": 1}


def main() -> None:
    """Compiles the steps, prints a line for each, and writes the results after each."""
    from experiments import records

    options = parser_of(__doc__).parse_args()
    cases: list[dict[str, Any]] = []
    for case in CASES:
        for precision in case.precisions:
            named = {"model": case.model, "mesh": case.mesh, "batch": case.batch}
            cases.append({**named, "precision": precision, **compiled(case, precision)})
            print(line(cases[-1]), flush=True)
            records.write(options.out / "eight_gpus.json", {"sequence": SEQUENCE, "cases": cases})


def line(case: dict[str, Any]) -> str:
    """A case in words."""
    gigabytes = (f"{name} {case[name] / 1e9:6.1f} GB" for name in ("peak", "gathered", "summed"))
    name = f"{case['model']} {case['precision']}, {case['mesh']}, batch {case['batch']}"
    return ", ".join([f"{name:48}", *gigabytes])


def compiled(case: Case, precision: str) -> dict[str, float]:
    """Bytes of each GPU, and what it receives in a step."""
    from experiments.hopper import compile_step, there

    sizes = {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1, **sizes_of(case.mesh)}
    how = argparse.Namespace(model=case.model, layers=None, sequence=SEQUENCE)
    options = {"precision": precision, "batch": case.batch, "released": False, "offloaded": False}
    with there():
        config = config_of(options, how, GPUS)
        program, memory, _ = compile_step(config, tuple(sizes.values()))
    return {"peak": memory.peak, **received(program.as_text())}


def received(program: str) -> dict[str, float]:
    """The bytes that a device receives when it runs a program, as XLA writes it.

    >>> received("x = (f8e4m3fn[4,8], f8e4m3fn[8,8]) all-gather-start(y), replica_groups={{0,1}}")
    {'gathered': 32.0, 'summed': 0.0}
    """
    found = dict.fromkeys(("gathered", "summed"), 0.0)
    for results, kind, begins, rest in COLLECTIVE.findall(program):
        arrays = [
            math.prod(map(int, filter(None, shape.split(",")))) * _bytes(dtype)
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results)
        ]
        if begins and kind != "all-reduce":
            arrays = arrays[len(arrays) // 2 :]  # operands come before results
        devices = _devices(rest)
        whole = sum(arrays) * (devices if kind == "reduce-scatter" else 1)
        times = 2 if kind == "all-reduce" else 1
        name = "gathered" if kind in GATHERED else "summed"
        found[name] += times * whole * (devices - 1) / devices
    return found


def _bytes(dtype: str) -> int:
    """As in "bf16", "f8e4m3fn" or "s32"."""
    return BYTES[dtype] if dtype in BYTES else int(re.findall(r"\d+", dtype)[0]) // 8


def _devices(attributes: str) -> int:
    """How many devices act together, from a list of groups, a shape of them, or a mesh's axes."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(listed[1].split(","))
    if shape := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(shape[1])
    named = re.search(r"replica_groups=mesh\[([^]]*)\].*? \{('[^}]*)\}", attributes)
    assert named, attributes
    sizes = dict(axis.split("=") for axis in named[1].split(","))
    return math.prod(int(sizes[axis]) for axis in named[2].split(","))


if __name__ == "__main__":
    main()
