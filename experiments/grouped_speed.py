"""How long the MLPs of experts take, forward and with the backward pass, and their kernels.

Claim: a layer of 64 or 128 experts takes less than 1 / 1.4 of the time of the fastest in BF16.

    python -m experiments.grouped_speed                   on a GPU
    python -m experiments.grouped_speed --only olmoe qwen3
    python -m experiments.grouped_speed --schedules       tries schedules of the kernels
    python -m experiments.grouped_speed --small           tiny sizes, to try this script

    olmoe, qwen3    64 experts of 2048 x 1024, and 128 of 2048 x 768; 16,384 tokens choose 8 each
    mixtral         8 experts of 4096 x 14336; 16,384 tokens choose 2 each
    balanced        all experts have equally many tokens
    skewed          the most popular has several times the mean, the least popular a fraction

    ours            `coat.ops.grouped_mlp`, from numbers of experts to sums: sorting is part of it
    JAX             the same in BF16 through `lax.ragged_dot`, only where there is the memory: XLA
                    expands every row to one for each expert, most of them zero
    tokamax         the plain formula through `tokamax.ragged_dot`, where it is installed
    torch           the plain formula through `torch._grouped_mm`, on CUDA, compiled or not

Ways in JAX run in turns; torch in a process before.
"""

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from experiments.command import parser_of
from experiments.timing import medians_ms
from experiments.workers import reason, run_worker


class Layer(NamedTuple):
    """A layer of experts and its tokens."""

    tokens: int
    choices: int
    experts: int
    width: int
    hidden: int

    @property
    def operations(self) -> int:
        """Floating-point operations of one product."""
        return 2 * self.tokens * self.choices * self.width * self.hidden

    @property
    def expanded(self) -> int:
        """Bytes of all rows for each expert, in BF16."""
        return 2 * self.tokens * self.choices * self.experts * max(self.width, self.hidden)


LAYERS = {
    "olmoe": Layer(16384, 8, 64, 2048, 1024),
    "qwen3": Layer(16384, 8, 128, 2048, 768),
    "mixtral": Layer(16384, 2, 8, 4096, 14336),
}
SMALL = Layer(64, 2, 4, 32, 48)
ROUTES = ("balanced", "skewed")
SKEW = 1.0  # the exponent of the experts' popularity by rank
LIMIT = 240.0  # seconds for torch
BATCHES = {"warmup": 1, "batches": 5, "calls": 2}
MOST_EXPANDED = 8e9  # bytes of rows for each expert
# Height, width and depth of a block, warps, stages and how many blocks share columns.
BLOCKS = ((128, 256, 8), (256, 128, 8), (128, 128, 8), (128, 128, 4), (64, 256, 4))
SCHEDULES = tuple(
    (height, width, 128, together, warps, stages)
    for (height, width, warps), stages, together in itertools.product(BLOCKS, (3, 4), (4, 8, 16))
)

TUNED = (
    ("PRODUCT", "product, gate"),
    ("PRODUCT", "product, down"),
    ("PRODUCT", "product, gradient of x"),
    ("OUTER", "outer product"),
)

Case = dict[str, Any]


def main() -> None:
    """Measures each layer, and writes the results after each."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=LAYERS, default=list(LAYERS), help="some of the layers")
    add("--schedules", action="store_true", help="try schedules of the kernels")
    add("--small", action="store_true", help="tiny sizes, to try this script")
    add("--no-torch", action="store_true", help="leave torch out")
    add("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        for case in in_torch(**options.worker):
            print(json.dumps(case), flush=True)
        return
    told = [
        {"name": name, "route": route, "small": options.small}
        for name, route in itertools.product(options.only, ROUTES)
    ]
    measure = tuned if options.schedules else layers_and_kernels
    # JAX takes most of the GPU's memory and keeps it.
    theirs = [
        None
        if options.no_torch or options.schedules
        else run_worker("experiments.grouped_speed", f"--worker={json.dumps(one)}", limit=LIMIT)
        for one in told
    ]
    from experiments import records

    path = options.out / f"grouped_{'schedules' if options.schedules else 'speed'}.json"
    cases: list[Case] = []
    for one, ended in zip(told, theirs, strict=True):
        if ended is not None and ended.code:
            print(f"{one['name']}: torch ended early: {reason(ended.stderr)}", flush=True)
        for case in [*(ended.results if ended else []), *measure(**one)]:
            cases.append({"layer": one["name"], "route": one["route"], **case})
            print(line(cases[-1]), flush=True)
            records.write(path, {"layers": shapes(options.small), "cases": cases})


def shapes(small: bool) -> dict[str, Any]:
    """The sizes of the layers."""
    return {name: (SMALL if small else layer)._asdict() for name, layer in LAYERS.items()}


def line(case: Case) -> str:
    """A case in words."""
    begin = f"{case['layer']:8} {case['route']:9} {case['way']:44}"
    if "both" in case:
        return f"{begin} forward {case['forward']:8.3f} ms, with backward {case['both']:8.3f} ms"
    rate = f" {case['tflops']:7.0f} TFLOP/s" if "tflops" in case else ""
    return f"{begin} {case['ms']:8.3f} ms{rate}"


def choices_of(layer: Layer, route: str) -> np.ndarray:
    """The experts that each token chose, all different."""
    rng = np.random.default_rng(0)
    if route == "balanced":
        in_turns = np.arange(layer.tokens * layer.choices) % layer.experts
        return rng.permutation(in_turns.reshape(layer.tokens, layer.choices)).astype(np.int32)
    popularity = -SKEW * np.log(1 + np.arange(layer.experts))
    scores = popularity + rng.gumbel(size=(layer.tokens, layer.experts))
    return np.argsort(-scores, axis=1)[:, : layer.choices].astype(np.int32)


# --- In JAX ----------------------------------------------------------------------------------


def arrays_of(layer: Layer, route: str) -> tuple[Any, ...]:
    """x, gate, up, down, the weights of choices, their experts, and the gradient of the result."""
    import jax
    import jax.numpy as jnp

    tokens, choices, experts, width, hidden = layer
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def normal(*shape: int, over: float = 1.0) -> Any:
        return jax.random.normal(next(keys), shape, jnp.bfloat16) / over**0.5

    first = [normal(experts, width, hidden, over=width) for _ in range(2)]
    down = normal(experts, hidden, width, over=hidden)
    weights = jax.nn.softmax(normal(tokens, choices).astype(jnp.float32))
    chosen = jnp.asarray(choices_of(layer, route))
    return normal(tokens, width), *first, down, weights, chosen, normal(tokens, width)


def ways() -> dict[str, Callable[..., Any]]:
    """Functions of x, gate, up, down, weights and experts."""
    import jax

    import coat_jax as coat
    from coat_jax import ops
    from coat_jax.kernels import routing

    def ours(precision: Any, implementation: Any = None) -> Callable[..., Any]:
        def mlp(x: Any, gate: Any, up: Any, down: Any, weights: Any, experts: Any) -> Any:
            how = {"precision": precision, "implementation": implementation}
            return ops.grouped_mlp(x, gate, up, down, experts, weights, **how)

        return mlp

    def plain(ragged_dot: Callable[..., Any]) -> Callable[..., Any]:
        def mlp(x: Any, gate: Any, up: Any, down: Any, weights: Any, experts: Any) -> Any:
            groups = routing.group(experts, len(gate), 1)
            rows = x[groups.tokens]
            a = jax.nn.silu(ragged_dot(rows, gate, groups.sizes))
            a *= ragged_dot(rows, up, groups.sizes)
            y = ragged_dot(a, down, groups.sizes)
            return routing.combine(y, groups, x.dtype, "xla", weights)

        return mlp

    found = {
        "ours, FP8": ours(coat.COAT),
        "ours, forward in BF16": ours(coat.COAT_BF16_FORWARD),
        "ours, BF16": ours(coat.BF16),
        "JAX, BF16": ours(coat.BF16, "xla"),
    }
    if find_spec("tokamax"):
        import tokamax

        found["tokamax, BF16"] = plain(tokamax.ragged_dot)
    return found


def run_of(function: Callable[..., Any], *arrays: Any) -> Any:
    """A compiled function as `timing` takes it."""
    import jax

    def anew(*arrays: Any) -> Any:
        """JAX would not trace the same function a second time, for another schedule."""
        return function(*arrays)

    program = jax.jit(anew).lower(*arrays).compile()
    result: list[Any] = [None]

    def call() -> None:
        result[0] = program(*arrays)

    return call, lambda: jax.block_until_ready(result[0])


def layers_and_kernels(name: str, route: str, small: bool) -> Iterator[Case]:
    """Every way for the layer, in turns; then each kernel of ours."""
    import jax

    layer = SMALL if small else LAYERS[name]
    *arrays, experts, dy = arrays_of(layer, route)

    def both(mlp: Callable[..., Any]) -> Callable[..., Any]:
        def function(arrays: Any, experts: Any, dy: Any) -> Any:
            y, pull = jax.vjp(lambda *arrays: mlp(*arrays, experts), *arrays)
            return y, pull(dy)

        return function

    runs, named = [], ways()
    if layer.expanded > MOST_EXPANDED:
        del named["JAX, BF16"]
    for mlp in named.values():
        runs += [run_of(mlp, *arrays, experts), run_of(both(mlp), arrays, experts, dy)]
    times = medians_ms(runs, **BATCHES)
    for i, way in enumerate(named):
        yield {"way": way, "forward": times[2 * i], "both": times[2 * i + 1]}
    found = kernels(layer, route)
    times = medians_ms([run_of(*call) for call, _ in found.values()], **BATCHES)
    for (way, (_, operations)), ms in zip(found.items(), times, strict=True):
        rate = {"tflops": operations / ms / 1e9} if operations else {}
        yield {"way": f"kernel: {way}", "ms": ms, **rate}


def kernels(layer: Layer, route: str) -> dict[str, tuple[tuple[Any, ...], int]]:
    """A function for each kernel with its arguments, and its floating-point operations."""
    import jax
    import jax.numpy as jnp

    from coat_jax.kernels import gemm, grouped, routing
    from coat_jax.kernels.dispatch import choose
    from coat_jax.kernels.gemm import Operand
    from coat_jax.numerics.formats import E4M3, E5M2

    how = choose(None)
    x, gate, up, down, weights, experts, dy = arrays_of(layer, route)
    groups = jax.jit(routing.group, static_argnums=1)(experts, layer.experts)
    codes = jax.jit(gemm.operand, static_argnums=(1, 2, 3))
    n, g = codes(x, E4M3, "straight", how), codes(dy, E5M2, "straight", how)
    straight = [codes(w, E4M3, "straight", how) for w in (gate, up, down)]
    turned = [codes(w, E4M3, "transposed", how) for w in (gate, down)]
    rows = groups.choices.shape[0]
    wide = jax.random.normal(jax.random.key(1), (rows, layer.hidden), jnp.bfloat16)
    a, d = codes(wide, E4M3, "both", how), codes(wide, E5M2, "both", how)
    y = jax.random.normal(jax.random.key(2), (rows, layer.width), jnp.bfloat16)
    if how == "triton":
        gather = jax.jit(grouped.gather_transposed)
        columns = Operand(None, gather(n.values, groups), n.scale)
    else:
        columns = Operand(groups.of_tokens(n.values), None, n.scale)
    one, bf16 = layer.operations, jnp.bfloat16

    def product(n: Any, w: Any, groups: Any) -> Any:
        return grouped.product(n, w, groups, bf16, how, of_tokens=True)

    def down_product(a: Any, w: Any, groups: Any) -> Any:
        return grouped.product(a, w, groups, bf16, how)

    def of_dy(g: Any, w: Any, groups: Any) -> Any:
        return grouped.product_transposed([g], [w], groups, bf16, how, of_tokens=True)

    def of_hidden(d: Any, w: Any, v: Any, groups: Any) -> Any:
        return grouped.product_transposed([d, d], [w, v], groups, bf16, how)

    def outer(columns: Any, d: Any, groups: Any) -> Any:
        return grouped.outer_product(columns, d, groups, bf16, how)

    def combine(y: Any, groups: Any, weights: Any) -> Any:
        return routing.combine(y, groups, bf16, how, weights)

    found: dict[str, tuple[tuple[Any, ...], int]] = {
        "product, gate": ((product, n, turned[0], groups), one),
        "product, down": ((down_product, a, turned[1], groups), one),
        "product, gradient of the activation": ((of_dy, g, straight[2], groups), one),
        "product, gradient of x": ((of_hidden, d, *straight[:2], groups), 2 * one),
        "outer product": ((outer, columns, d, groups), one),
        "sort": ((functools.partial(routing.group, count=layer.experts), experts), 0),
        "sum of choices": ((combine, y, groups, weights), 0),
    }
    if how == "triton":
        found["codes of x as columns"] = (grouped.gather_transposed, n.values, groups), 0
    return found


def tuned(name: str, route: str, small: bool) -> Iterator[Case]:
    """The products with each schedule, in turns; the fastest first."""
    from coat_jax.kernels import grouped

    found = kernels(SMALL if small else LAYERS[name], route)
    for attribute, kind in TUNED:
        (call, operations), runs = found[kind], []
        for schedule in SCHEDULES:
            with mock.patch.object(grouped, attribute, grouped.Plan(*schedule)):
                runs.append(run_of(*call))
        times = medians_ms(runs, **BATCHES)
        for ms, schedule in sorted(zip(times, SCHEDULES, strict=True)):
            words = "{} x {} x {}, {} together, {} warps, {} stages".format(*schedule)
            yield {"way": f"{kind}: {words}", "ms": ms, "tflops": operations / ms / 1e9}


# --- In torch --------------------------------------------------------------------------------


def in_torch(name: str, route: str, small: bool) -> Iterator[Case]:
    """The plain formula in BF16, on CUDA."""
    import torch

    if not (torch.cuda.is_available() and hasattr(torch, "_grouped_mm")):
        return
    layer = SMALL if small else LAYERS[name]
    tokens, choices, experts, width, hidden = layer
    how = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    dy = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(tokens, width, **how)
    gate, up = (torch.randn(experts, width, hidden, **how) for _ in range(2))
    down = torch.randn(experts, hidden, width, **how)
    weights = torch.rand(tokens, choices, **how)
    chosen = torch.from_numpy(choices_of(layer, route)).cuda()

    def mlp() -> Any:
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        ends = torch.cumsum(torch.bincount(flat, minlength=experts), 0).to(torch.int32)
        rows = x[order // choices]
        a = torch.nn.functional.silu(torch._grouped_mm(rows, gate, offs=ends))
        a = a * torch._grouped_mm(rows, up, offs=ends)
        y = torch._grouped_mm(a, down, offs=ends) * weights.reshape(-1)[order, None]
        return torch.zeros_like(x).index_add(0, order // choices, y)

    def milliseconds(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(8):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
        return statistics.median(times[3:])

    inputs = x, gate, up, down, weights

    def gradients(function: Callable[[], Any]) -> Any:
        """Not by `backward`, which would add each gradient to that of the call before."""
        return torch.autograd.grad(function(), inputs, dy)

    for how_run, function in {"": mlp, ", compiled": torch.compile(mlp)}.items():
        with torch.no_grad():
            forward = milliseconds(function)
        both = milliseconds(functools.partial(gradients, function))
        yield {"way": f"torch._grouped_mm, BF16{how_run}", "forward": forward, "both": both}


if __name__ == "__main__":
    main()
