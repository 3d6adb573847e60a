"""Times steps of optimizers; `experiments.optimizer_step` says how.

python -m experiments.optimizer_step adamw                   on a GPU
python -m experiments.optimizer_step muon --model tiny --layers 2
"""

import argparse
import json
from typing import Any

from experiments.command import parser_of
from experiments.optimizer_step.cases import KINDS, PRODUCTS, TORCH, Case, about
from experiments.workers import outcome, run_worker

FILES = {"adamw": "optimizer_step", "muon": "muon_step"}
SIZES = ("elements", "model", "layers")

Figures = dict[str, Any]


def main() -> None:
    """Measures every case in its own process, prints a line for each and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("kind", choices=KINDS, help="of optimizer")
    parser.add_argument("--elements", type=int, default=28, help="log2 of the size of one array")
    parser.add_argument("--model", default="llama2_7b", help="of muon: in coat.models.PRESETS")
    parser.add_argument("--layers", type=int, default=8, help="of muon's model")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure(options.kind, options.worker, options)), flush=True)
        return
    import jax

    from experiments import records

    gpus = jax.device_count()
    several = f"_{gpus}_gpus" if options.kind == "muon" and gpus > 1 else ""
    path = options.out / f"{FILES[options.kind]}{several}.json"
    cases: list[Figures] = []
    for case in KINDS[options.kind](options):
        cases.append(case | _in_a_process(case, options))
        _compare_with_products(cases)
        print(f"{', '.join(case.values()):60} {_line(cases[-1])}", flush=True)
        records.write(path, about(options.kind, options) | {"cases": cases})


def _in_a_process(case: Case, options: argparse.Namespace) -> Figures:
    sizes = [f"--{name}={getattr(options, name)}" for name in SIZES]
    worker = options.kind, *sizes, "--worker", json.dumps(case)
    return outcome(run_worker("experiments.optimizer_step", *worker))


def measure(kind: str, case: Case, options: argparse.Namespace) -> Figures:
    """A case in this process, which imports only the case's framework."""
    name = case.get("optimizer") or case["case"]
    module: Any
    if name.startswith(TORCH):
        from experiments.optimizer_step import in_torch as module
    elif kind == "muon":
        from experiments.optimizer_step import muon as module
    else:
        from experiments.optimizer_step import in_jax as module
    figures: Figures = getattr(module, kind)(case, options)
    return figures


def _compare_with_products(cases: list[Figures]) -> None:
    """Adds to a case of Muon how many times as long as the products alone it takes."""
    first, last = cases[0], cases[-1]
    if first.get("case") == PRODUCTS and "ms" in first and "ms" in last:
        last["over_products"] = last["ms"] / first["ms"]


def _line(case: Figures) -> str:
    if "failed" in case:
        return f"failed: {case['failed']}"
    line = f"{case['ms']:9.3f} ms"
    if "extra_bytes" in case:
        line += f"   extra {case['extra_bytes'] / 2**20:8.1f} MiB"
        line += f"   state {case['state_bytes_per_param']:.3f} B/param"
    if "over_products" in case:
        line += f"   {case['over_products']:.2f} x products"
    return line


if __name__ == "__main__":
    main()
