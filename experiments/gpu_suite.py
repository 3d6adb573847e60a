"""What only a GPU can show: the tests of the kernels, and a smoke benchmark of two minutes.

    make gpu                                     both, with one line for each result
    python -m experiments.gpu_suite --no-tests   the benchmark alone
    ... --label jax_0_11                         results in gpu_suite_jax_0_11.json

The tests are those marked `gpu`, and `several_gpus` where there are several; one that is skipped
fails. The benchmark measures, each in a process of its own, as a user would:

    stacks      4 layers of Llama-2-7B, 8 x 2048 tokens, in each precision: forward and backward
    optimizer   one fused AdamW step over 2^28 parameters
    training    one step of the trainer with Triton kernels and through XLA, which must agree
    llama2_7b   how long `coat train llama2_7b:one_gpu` compiles its step

A program is compiled twice: cold, and warm in a second process that finds it in JAX's compilation
cache. Results are written to gpu_suite.json; the exit code is 0 if all tests passed and all bounds
held.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import Any

from experiments.command import ROOT, parser_of
from experiments.workers import outcome, run_worker

WORKERS = ("stacks", "optimizer", "training", "llama2_7b")  # functions of `gpu_smoke`

# The two programs differ by BF16's rounding, 2^-8, which changes a code where a value lies halfway
# between two. The codes of gradients in E5M2 are 2^-2 apart, so each product differs by
# sqrt(2^-8 2^-2) = 2^-5 of its size, and a gradient passes through a dozen of them. A loss is a
# mean over thousands of tokens.
BOUNDS = {"loss": 5e-4, "gradient_norm": 5e-2, "gradients": 2**-3}
COLD, WARM = 50.0, 13.0  # seconds in which 16 cores must compile the step of Llama-2-7B

Figures = dict[str, Any]


def main() -> int:
    """Runs the suite; returns the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--no-tests", action="store_true", help="only the benchmark")
    parser.add_argument("--label", help="what the name of the results file ends in")
    parser.add_argument("--no-benchmark", action="store_true", help="only the tests")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try this script")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        from experiments import gpu_smoke

        worker = getattr(gpu_smoke, options.worker)
        print(json.dumps(worker(options.small, options.compile_only)))
        return 0
    import jax

    if jax.default_backend() != "gpu" and not options.small:
        print("This needs a GPU that JAX can use, and finds none.", file=sys.stderr)
        return 2
    from experiments import records

    figures: Figures = {}
    path = options.out / f"gpu_suite{f'_{options.label}' if options.label else ''}.json"
    if not options.no_tests:
        figures["tests"] = run_tests(jax.device_count())
        records.write(path, figures)
    if not options.no_benchmark:
        with tempfile.TemporaryDirectory() as cache:
            for name in WORKERS:
                figures[name] = _cold_and_warm(name, cache, options.small)
                records.write(path, figures)
    failures = failed(figures)
    for failure in failures:
        print(f"FAILED: {failure}")
    print(f"code {records.code_hash()}: {'not all is well' if failures else 'all is well'}")
    return 1 if failures else 0


def run_tests(devices: int) -> Figures:
    """Runs the tests marked gpu; the output is pytest's own."""
    chosen = "gpu" if devices > 1 else "gpu and not several_gpus"
    command = [sys.executable, "-m", "pytest", "-m", chosen]
    # The benchmark plugin, where installed, warns of xdist, and warnings are errors here.
    command += ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    if find_spec("xdist"):
        command += ["-n", str(min(12, os.cpu_count() or 1))]
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    begin = time.perf_counter()
    print("$", " ".join(["python", *command[1:]]), flush=True)
    summary = ""
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as pytest:
        for line in pytest.stdout or ():
            print(line, end="", flush=True)
            summary = line.strip("= \n") or summary
    return {
        "exit_code": pytest.returncode,
        "summary": summary,
        "seconds": time.perf_counter() - begin,
    }


def failed(figures: Figures) -> list[str]:
    """What is wrong with the results, a line each."""
    found = []
    if figures.get("tests", {}).get("exit_code"):
        found.append(f"tests: {figures['tests']['summary']}")
    for name in WORKERS:
        if "failed" in figures.get(name, {}):
            found.append(f"{name}: {figures[name]['failed']}")
        again = figures.get(name, {}).get("warm")  # seconds, of one program or by program
        if isinstance(again, dict) and "failed" in again:
            found.append(f"{name}, run again: {again['failed']}")
    start = figures.get("llama2_7b", {})
    times = ("cold", start.get("compile_seconds"), COLD), ("warm", start.get("warm"), WARM)
    for when, seconds, limit in times:
        if isinstance(seconds, float) and seconds > limit:
            found.append(f"llama2_7b: compiled {when} in {seconds:.1f} s, limit {limit:.0f} s")
    for name, bound in BOUNDS.items():
        apart = figures.get("training", {}).get("apart", {}).get(name, 0.0)
        if not apart <= bound:  # NaN fails
            found.append(f"training: {name} differs by {apart:.1e}, bound {bound:.1e}")
    return found


def _cold_and_warm(name: str, cache: str, small: bool) -> Figures:
    """A worker's figures, with the seconds that its programs took to compile in a second run."""
    figures = _worker(name, cache, small)
    if "failed" not in figures:
        again = _worker(name, cache, small, "--compile-only")
        figures["warm"] = again.get("compile_seconds", again)
    print(f"{name}: {json.dumps(figures)}", flush=True)
    return figures


def _worker(name: str, cache: str, small: bool, *flags: str) -> Figures:
    given = ["--worker", name, *flags, *(["--small"] if small else [])]
    return outcome(run_worker("experiments.gpu_suite", *given, JAX_COMPILATION_CACHE_DIR=cache))


if __name__ == "__main__":
    sys.exit(main())
