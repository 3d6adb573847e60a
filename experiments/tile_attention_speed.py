"""How long attention between tiles takes, by the share of tiles that is computed.

Claim: at a fifth of the tiles, FP8 forward and BF16 backward take less than a third of dense time.

    python -m experiments.tile_attention_speed                on a GPU
    python -m experiments.tile_attention_speed --only 480p
    python -m experiments.tile_attention_speed --small        tiny sizes, to try this script

    720p, 480p, 16k    grids of 21 x 45 x 80, 21 x 30 x 52 and 16 x 32 x 32 tokens
    ours               `coat.ops.tile_attention`, in FP8 and in BF16, from tokens in the order of
                       the grid: quantization and permutation are part of it
    cuDNN              dense, in BF16, through `jax.nn.dot_product_attention`
    torch              dense, its flash attention; and FlexAttention, compiled, with a block mask of
                       the same tiles, from tokens in the order of tiles

12 heads of 128 numbers. Our time and cuDNN's are taken in turns; torch's in a process before.
"""

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from experiments.command import parser_of
from experiments.timing import medians_ms
from experiments.workers import reason, run_worker

GRIDS = {"720p": (21, 45, 80), "480p": (21, 30, 52), "16k": (16, 32, 32)}
SMALL = (4, 8, 8)
HEADS, WIDTH = 12, 128
DENSITIES = (0.1, 0.21, 0.35, 0.5, 1.0)
NEAR = 0.001  # of a density
LIMIT = 240.0  # seconds for torch
BATCHES = {"warmup": 1, "batches": 5, "calls": 2}
CUDNN = "cuDNN, BF16, dense"
KINDS = {"forward": "forward", "both": "with backward"}

Case = dict[str, Any]


def main() -> None:
    """Measures each grid, and writes the results after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=GRIDS, help="one of the grids")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try this script")
    parser.add_argument("--no-torch", action="store_true", help="leave torch out")
    parser.add_argument("--draw", action="store_true", help="only draw the results that are there")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        for case in in_torch(**options.worker):
            print(json.dumps(case), flush=True)
        return
    from experiments import records

    path = options.out / "tile_attention_speed.json"
    if options.draw:
        draw(records.read(path)["cases"], path.with_suffix(".png"))
        return
    names = [options.only] if options.only else list(GRIDS)
    told = [{"name": name, "small": options.small} for name in names]
    # JAX takes most of the GPU's memory and keeps it.
    theirs = [
        None
        if options.no_torch
        else run_worker(
            "experiments.tile_attention_speed",
            f"--worker={json.dumps(one)}",
            limit=LIMIT,
            JAX_PLATFORMS="cpu",
        )
        for one in told
    ]
    cases: list[Case] = []
    for one, ended in zip(told, theirs, strict=True):
        if ended is not None and ended.code:
            print(f"{one['name']}: torch ended early: {reason(ended.stderr)}", flush=True)
        for case in [*(ended.results if ended else []), *in_jax(**one)]:
            cases.append(case)
            words = f"forward {case['forward']:8.2f} ms, with backward {case['both']:8.2f} ms"
            print(f"{case['grid']:5} {case['way']:22} {case['density']:5.2f}  {words}", flush=True)
            figures = {"heads": HEADS, "width": WIDTH, "cases": cases}
            records.write(path, figures)
    draw(cases, path.with_suffix(".png"))


def draw(cases: list[Case], path: Path) -> None:
    """Draws how many times as fast as cuDNN each way is, over the share of tiles."""
    import matplotlib.pyplot as plt

    from experiments import records

    grids = list(dict.fromkeys(case["grid"] for case in cases))
    ways = list(dict.fromkeys(case["way"] for case in cases if case["way"] != CUDNN))
    with plt.rc_context(records.CHART | {"axes.grid.axis": "both"}):
        shape = {"nrows": len(KINDS), "ncols": len(grids)}
        size = {"figsize": (3.4 * len(grids) + 1.6, 5.6), "squeeze": False}
        figure, axes = plt.subplots(**shape, **size, sharex=True, sharey=True)
        for (row, kind), (column, grid) in itertools.product(enumerate(KINDS), enumerate(grids)):
            panel, of_grid = axes[row, column], [case for case in cases if case["grid"] == grid]
            (dense,) = (case for case in of_grid if case["way"] == CUDNN)
            for way, color in zip(ways, records.LINES, strict=False):
                points = [
                    (case["density"], dense[kind] / case[kind])
                    for case in of_grid
                    if case["way"] == way
                ]
                panel.plot(*zip(*sorted(points), strict=True), "o-", ms=4, color=color, label=way)
            panel.axhline(1, color=records.INK, lw=0.8)
            panel.set(xscale="log", yscale="log", title=f"{grid}, {KINDS[kind]}")
            for axis, ticks in ((panel.xaxis, (0.1, 0.2, 0.5, 1)), (panel.yaxis, (1, 2, 5, 10))):
                axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
                axis.minorticks_off()
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
        figure.supxlabel("share of tiles")
        figure.supylabel("times as fast as dense attention by cuDNN")
        figure.savefig(path)
        plt.close(figure)


def window_of(tiles: Any, density: float) -> tuple[int, ...]:
    """The most cubic of the windows whose density is near this one, or else the nearest."""
    shape = np.array(tiles.shape)
    sides = np.meshgrid(*(np.arange(1, n + 1) for n in shape), indexing="ij")
    shares = np.stack(sides, -1).reshape(-1, len(shape)) / shape
    off, uneven = abs(np.prod(shares, axis=1) - density), np.ptp(shares, axis=1)
    first = np.lexsort((uneven, np.maximum(off, NEAR)))[0]
    return tuple(int(n) for n in np.rint(shares[first] * shape))


def windows(tiles: Any) -> list[tuple[int, ...]]:
    """A window for each density."""
    return list(dict.fromkeys(window_of(tiles, density) for density in DENSITIES))


def in_jax(name: str, small: bool) -> Iterator[Case]:
    """Ours and cuDNN's, in turns."""
    import jax
    import jax.numpy as jnp

    from coat_jax import ops

    grid = SMALL if small else GRIDS[name]
    tiles = ops.Tiles.best(grid, 64) if small else ops.Tiles.best(grid)
    shape = (1, int(np.prod(grid)), HEADS, WIDTH)
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    on_gpu = jax.default_backend() == "gpu"

    def dense(q: Any, k: Any, v: Any) -> Any:
        how = "cudnn" if on_gpu else None
        even = [(0, 0), (0, shape[1] % 2), (0, 0), (0, 0)]
        q, k, v = (jnp.pad(x, even) for x in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, implementation=how)[:, : shape[1]]

    attends: list[tuple[str, float, Callable[..., Any]]] = [(CUDNN, 1.0, dense)]
    for window in windows(tiles):
        lists = tiles.window(window)
        for form in ("fp8", "bf16"):
            attend = functools.partial(ops.tile_attention, tiles=tiles, lists=lists, format=form)
            attends.append((f"ours, {form.upper()}", float(lists.density[0]), attend))
    results: list[Any] = [None]

    def run_of(function: Callable[..., Any], *arrays: Any) -> Any:
        program = jax.jit(function).lower(*arrays).compile()

        def call() -> None:
            results[0] = program(*arrays)

        return call, lambda: jax.block_until_ready(results[0])

    def with_backward(attend: Callable[..., Any]) -> Callable[..., Any]:
        def function(q: Any, k: Any, v: Any, do: Any) -> Any:
            o, pull = jax.vjp(attend, q, k, v)
            return o, *pull(do)

        return function

    runs = [run_of(attend, q, k, v) for _, _, attend in attends]
    runs += [run_of(with_backward(attend), q, k, v, do) for _, _, attend in attends]
    times = medians_ms(runs, **BATCHES)
    for i, (way, density, _) in enumerate(attends):
        both = times[len(attends) + i]
        yield {"grid": name, "way": way, "density": density, "forward": times[i], "both": both}


def in_torch(name: str, small: bool) -> Iterator[Case]:
    """torch's flash attention, and FlexAttention over the same tiles."""
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from coat_jax.ops.tiles import Tiles, visible_pairs

    device = "cuda" if torch.cuda.is_available() else "cpu"
    grid = SMALL if small else GRIDS[name]
    tiles = Tiles.best(grid, 64) if small else Tiles.best(grid)
    length = int(np.prod(grid))

    def arrays(rows: int) -> list[Any]:
        shape = (1, HEADS, rows, WIDTH)
        return [
            torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(4)
        ]

    def timed(way: str, density: float, attend: Callable[..., Any], rows: int) -> Case:
        q, k, v, do = arrays(rows)
        seconds: dict[str, list[float]] = {"forward": [], "both": []}
        for _ in range(2 if small else 6):
            for kind, of_kind in seconds.items():
                begin = time.perf_counter()
                if kind == "forward":
                    with torch.no_grad():
                        attend(q, k, v)
                else:
                    attend(q, k, v).backward(do)
                if device == "cuda":
                    torch.cuda.synchronize()
                of_kind.append(1e3 * (time.perf_counter() - begin))
        medians = {kind: statistics.median(of[len(of) // 2 :]) for kind, of in seconds.items()}
        return {"grid": name, "way": way, "density": density, **medians}

    def flash(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if device == "cuda" else SDPBackend.MATH):
            return functional.scaled_dot_product_attention(q, k, v)

    yield timed("torch, flash attention", 1.0, flash, length)
    if device == "cpu":
        return  # where FlexAttention has no backward pass
    rows, slots = tiles.count * tiles.slots, tiles.slots
    compiled = flex_attention if small else torch.compile(flex_attention)
    block_mask = create_block_mask if small else torch.compile(create_block_mask)
    pairs = torch.empty(tiles.count, tiles.count, dtype=torch.bool, device=device)

    def sees(b: Any, h: Any, query: Any, key: Any) -> Any:
        del b, h
        return pairs[query // slots, key // slots] & (key % slots < tiles.tokens)

    for window in windows(tiles):
        lists = tiles.window(window)
        # In place: torch compiles again for another function or array.
        pairs.copy_(torch.from_numpy(np.array(visible_pairs(lists)[0, 0])))
        mask = block_mask(sees, None, None, rows, rows, device=device)
        attend = functools.partial(compiled, block_mask=mask)
        yield timed("torch, FlexAttention", float(lists.density[0]), attend, rows)


if __name__ == "__main__":
    main()
