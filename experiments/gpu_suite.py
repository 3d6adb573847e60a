"""What only a GPU can show: the tests of the kernels, and a smoke benchmark of two minutes.

    make gpu                                     both, with one line for each result
    python -m experiments.gpu_suite --no-tests   the benchmark alone

The tests are those marked `gpu`, and `several_gpus` where there are several; one that is skipped
fails. The benchmark measures, each in a process of its own and so as a user meets it:

    stacks      4 layers of Llama-2-7B, 8 x 2048 tokens, in each precision: forward and backward
    optimizer   one fused AdamW step over 2^28 parameters
    training    one step of the trainer with Triton kernels and through XLA, which must agree

A program is compiled twice: cold, and warm in a second process that finds it in JAX's compilation
cache. Results are written to gpu_suite.json with a hash of `coat_jax/`, so that they can be told
from those of other code; the exit code is 0 if all tests passed and all bounds held.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results"
LAYERS = 4

# The two programs differ by BF16's rounding, 2^-8, which changes a code where a value lies halfway
# between two. The codes of gradients in E5M2 are 2^-2 apart, so each product differs by
# sqrt(2^-8 2^-2) = 2^-5 of its size, and a gradient passes through a dozen of them. A loss is a
# mean over thousands of tokens.
BOUNDS = {"loss": 5e-4, "gradient_norm": 5e-2, "gradients": 2**-3}

Figures = dict[str, Any]


def main() -> int:
    """Runs the suite; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-tests", action="store_true", help="only the benchmark")
    parser.add_argument("--no-benchmark", action="store_true", help="only the tests")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for the results")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try this script")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        WORKERS[options.worker](options.small, options.compile_only)
        return 0
    import jax

    if jax.default_backend() != "gpu" and not options.small:
        print("This needs a GPU that JAX can use, and finds none.", file=sys.stderr)
        return 2
    from experiments import records

    figures: Figures = {"code": code_hash()}
    if not options.no_tests:
        figures["tests"] = run_tests(jax.device_count())
        records.write(options.out / "gpu_suite.json", figures)
    if not options.no_benchmark:
        with tempfile.TemporaryDirectory() as cache:
            for name in WORKERS:
                figures[name] = _cold_and_warm(name, cache, options.small)
                records.write(options.out / "gpu_suite.json", figures)
    failures = failed(figures)
    for failure in failures:
        print(f"FAILED: {failure}")
    print(f"code {figures['code']}: {'not all is well' if failures else 'all is well'}")
    return 1 if failures else 0


def code_hash() -> str:
    """A hash of every source file of the package."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "coat_jax").rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def run_tests(devices: int) -> Figures:
    """Runs the tests marked gpu; the output is pytest's own."""
    chosen = "gpu" if devices > 1 else "gpu and not several_gpus"
    command = [sys.executable, "-m", "pytest", "-m", chosen]
    # A plugin that would be installed beside it warns of xdist, and warnings are errors here.
    command += ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    if _installed("xdist"):
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    begin = time.perf_counter()
    print("$", " ".join(["python", *command[1:]]), flush=True)
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False
    )
    print(done.stdout, flush=True)
    return {
        "exit_code": done.returncode,
        "summary": done.stdout.strip().splitlines()[-1].strip("= "),
        "seconds": time.perf_counter() - begin,
    }


def _installed(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None


def failed(figures: Figures) -> list[str]:
    """What is wrong with the results, a line each."""
    found = []
    if figures.get("tests", {}).get("exit_code"):
        found.append(f"tests: {figures['tests']['summary']}")
    for name in WORKERS:
        if "failed" in figures.get(name, {}):
            found.append(f"{name}: {figures[name]['failed']}")
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
    from experiments.workers import reason

    command = [sys.executable, "-m", "experiments.gpu_suite", "--worker", name, *flags]
    command += ["--small"] if small else []
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": cache}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(json.loads(lines[-1])) if lines else {"failed": reason(done.stderr)}


# --- Workers: what is measured -----------------------------------------------------------------


def stacks(small: bool, compile_only: bool) -> None:
    """Layers in every precision."""
    from experiments.stacks import Sizes, median_ms
    from experiments.stacks_jax import PRESETS, prepare

    sizes = Sizes(64, 64, 2, 16) if small else Sizes()
    seconds, milliseconds = {}, {}
    for name, precision in PRESETS.items():
        begin = time.perf_counter()
        stack = prepare(sizes, LAYERS, precision)
        seconds[name] = time.perf_counter() - begin
        if not compile_only:
            milliseconds[name] = median_ms(stack.step, stack.wait)
    print(json.dumps({"layers": LAYERS, "compile_seconds": seconds, "ms": milliseconds}))


def optimizer(small: bool, compile_only: bool) -> None:
    """The fused AdamW step, of FP32 and BF16 parameters with BF16 gradients."""
    import jax.numpy as jnp

    side = 2**8 if small else 2**14
    seconds, milliseconds = {}, {}
    for name, dtype, rounds in (
        ("float32", jnp.float32, False),
        ("bfloat16", jnp.bfloat16, False),
        ("bfloat16, stochastic", jnp.bfloat16, True),
    ):
        seconds[name], milliseconds[name] = _fused_step(side, dtype, rounds, compile_only)
    print(json.dumps({"compile_seconds": seconds, "ms": milliseconds}))


def _fused_step(
    side: int, dtype: Any, rounds: bool, compile_only: bool
) -> tuple[float, float | None]:
    """Seconds to compile the step of a square matrix, and milliseconds to run it."""
    import jax
    import jax.numpy as jnp

    import coat_jax as coat
    from experiments.stacks import median_ms

    fused = coat.optax.fused_fp8_adamw(1e-4, b2=0.95, weight_decay=0.1, round_params=rounds)
    params = jax.random.normal(jax.random.key(0), (side, side), dtype)
    grads = 1e-3 * jax.random.normal(jax.random.key(1), (side, side), jnp.bfloat16)
    state = fused.init(params)
    begin = time.perf_counter()
    step = jax.jit(fused.step, donate_argnums=(0, 2)).lower(params, grads, state).compile()
    seconds = time.perf_counter() - begin
    if compile_only:
        return seconds, None
    now = [params, state]
    del params, state

    def run() -> None:
        now[:] = step(now[0], grads, now[1])

    return seconds, median_ms(run, lambda: jax.block_until_ready(now))


def training(small: bool, compile_only: bool) -> None:
    """One step of the trainer, with kernels and without: how far apart they are."""
    from unittest import mock

    from coat_jax.kernels import dispatch

    seconds, outcomes = {}, {}
    for name, there in (("triton", True), ("xla", False)):
        # By default XLA leaves out what rounds to FP8 and back.
        options = {} if there else {"xla_allow_excess_precision": False}
        with mock.patch.object(dispatch, "triton_installed", return_value=there and not small):
            seconds[name], outcomes[name] = _train_once(options, small, compile_only)
    figures: Figures = {"compile_seconds": seconds}
    if not compile_only:
        ours, theirs = outcomes["triton"], outcomes["xla"]
        figures["apart"] = {
            "loss": abs(ours[0] - theirs[0]) / theirs[0],
            "gradient_norm": abs(ours[1] - theirs[1]) / theirs[1],
            "gradients": _distance(ours[2], theirs[2]),
        }
    print(json.dumps(figures))


def _train_once(options: Figures, small: bool, compile_only: bool) -> tuple[float, Any]:
    """Seconds to compile; loss, norm of the gradients and first moments after one step."""
    import jax
    import jax.numpy as jnp

    from coat_jax import models
    from coat_jax.moments import Storage
    from coat_jax.training.batches import abstract_batch
    from coat_jax.training.config import MeshConfig, OptimizerConfig, TrainConfig
    from coat_jax.training.mesh import make_mesh
    from coat_jax.training.optimizer import make_optimizer
    from coat_jax.training.state import abstract_state, new_state
    from coat_jax.training.step import lower_step

    width, sequence = (64, 32) if small else (1024, 1024)
    heads = {"heads": width // 64, "kv_heads": width // 64, "head_dim": 64}
    config = TrainConfig(
        model=models.Config(
            vocab=2048,
            width=width,
            layers=2,
            ffn=11 * width // 4,
            context=sequence,
            precision="coat",
            param_dtype=jnp.bfloat16,
            **heads,
        ),
        optimizer=OptimizerConfig(schedule="constant", warmup=0.0, clip=None, b1=0.0),
        mesh=MeshConfig(data=1, fsdp=1, tensor=1),
        steps=1,
        batch=4,
        sequence=sequence,
    )
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    with jax.set_mesh(mesh):
        optimizer = make_optimizer(config)
        graph, abstract = abstract_state(config, optimizer, mesh)
        begin = time.perf_counter()
        program = lower_step(config, graph, optimizer, abstract, mesh).compile(options)
        seconds = time.perf_counter() - begin
        if compile_only:
            return seconds, None
        like = abstract_batch(config, mesh, packed=False)
        tokens = jax.random.randint(jax.random.key(0), like.tokens.shape, 0, config.model.vocab)
        data = like._replace(tokens=tokens, labels=jnp.roll(tokens, -1, -1))
        state, report = program(new_state(config, optimizer, mesh), data)
        # With b1 = 0 the first moment is the gradient.
        gradients = jax.tree.map(
            lambda *stored: Storage().read(type(state.moments.mu)(*stored)), *state.moments.mu
        )
    return seconds, (float(report.loss), float(report.gradient_norm), jax.device_get(gradients))


def _distance(ours: Any, theirs: Any) -> float:
    """|ours - theirs| / |theirs|, over all gradients."""
    import jax
    import numpy as np

    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    squares = [(np.sum((a - b) ** 2.0), np.sum(b**2.0)) for a, b in pairs]
    off, size = map(sum, zip(*squares, strict=True))
    return float(np.sqrt(off / size))


WORKERS: dict[str, Callable[[bool, bool], None]] = {
    "stacks": stacks,
    "optimizer": optimizer,
    "training": training,
}

if __name__ == "__main__":
    sys.exit(main())
