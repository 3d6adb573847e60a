"""How finely the saved inputs of non-linear layers must be scaled: per tensor, token or group.

Claim (the paper's figure 4a): norms and activations need one scale per 1 x 16 neighbours of the
hidden axis, and scales that tokens share hurt, above all at a norm's input.

    python -m experiments.granularity               four minutes on two CPU cores
    python -m experiments.granularity --steps 8     smoke test

A small Llama learns real text. The inputs of the norms and MLPs of three layers, and the gradients
of their outputs, are recorded on held-out text. Errors are RMS over RMS, against FP32, of these
inputs and of what the backward pass computes from them. In large models a few channels are tens to
hundreds of times larger than the rest; here they are not. So there are also errors of the other
channels after the three largest ones were multiplied by a factor, in every token.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
from rich.progress import track

from coat_jax.kernels.activation import activate, activate_backward
from coat_jax.kernels.norm import Norm, normalize, normalize_backward, statistics
from coat_jax.numerics import blocks, qtensor
from coat_jax.numerics.formats import E4M3
from experiments import records
from experiments.command import parser_of
from experiments.recorded_layers import Recorded, Rows, record

LAYERS = (0, 2, 4)
CHANNELS, FACTOR = 3, 100
OURS = "1 x 16, 2^n (ours)"

Stored = tuple[Rows, tuple[Array, ...]]  # the values it stands for, and the arrays it is
Coder = Callable[[Rows, int], Stored]  # with groups of a size
Keep = Callable[[Rows], Stored]
Errors = dict[str, float]


class Site(NamedTuple):
    """A non-linear layer: its inputs, and what its backward pass computes from them."""

    inputs: tuple[Rows, ...]
    backward: Callable[..., dict[str, Array]]


def norms_of(recorded: Recorded) -> list[Site]:
    """Both norms of a layer."""
    scales = (n.scale[...] for n in (recorded.layer.attention_norm, recorded.layer.mlp_norm))
    inputs, gradients = (recorded.x, recorded.y), (recorded.dn, recorded.dm)
    return [
        Site((x,), partial(_norm_backward, Norm(scale, eps=1e-5), gradient))
        for x, scale, gradient in zip(inputs, scales, gradients, strict=True)
    ]


def _norm_backward(norm: Norm, dn: Rows, x: Rows) -> dict[str, Array]:
    stats = statistics(x, norm)
    dx, _ = normalize_backward(x, stats, norm, dn)
    return {"x": x, "n": normalize(x, stats, norm), "dx": dx}


def mlp_of(recorded: Recorded) -> Site:
    """The MLP of a layer."""
    return Site((recorded.gate, recorded.up), partial(_mlp_backward, recorded.da))


def _mlp_backward(da: Rows, gate: Rows, up: Rows) -> dict[str, Array]:
    dgate, dup = activate_backward((gate, up), da, "silu")
    return {"gate": gate, "up": up, "a": activate((gate, up), "silu"), "dgate": dgate, "dup": dup}


# --- granularities ---------------------------------------------------------------------------


def _fp8(x: Rows, size: int) -> Stored:
    q = qtensor.quantize(x, E4M3, group_size=size)
    return qtensor.dequantize(q), (q.codes, q.scale)


def _int8(x: Rows, size: int) -> Stored:
    grouped = qtensor.split_groups(x, size)
    scale = qtensor.group_max(jnp.abs(grouped))[..., None] / 127
    codes = jnp.round(grouped / jnp.where(scale > 0, scale, 1.0)).astype(jnp.int8)
    return qtensor.join_groups(codes * scale, x.shape), (codes, scale)


def _power_of_two(x: Rows, size: int) -> Stored:
    kept = blocks.to_blocks(x, E4M3, size=size)
    return blocks.from_blocks(kept, size=size), tuple(kept)


@partial(jax.jit, static_argnums=(0, 1))
def _stored(code: Coder, over: str | int, x: Rows) -> Stored:
    """`x` with one scale per tensor, token, channel or `over` neighbours."""
    if over == "channel":
        values, arrays = code(x.T, x.shape[0])
        return values.T, arrays
    if over == "tensor":
        values, arrays = code(x.reshape(1, -1), x.size)
        return values.reshape(x.shape), arrays
    return code(x, x.shape[-1] if over == "token" else int(over))


GRANULARITIES: dict[str, tuple[Coder, str | int]] = {
    OURS: (_power_of_two, 16),
    "1 x 16": (_fp8, 16),
    "1 x 64": (_fp8, 64),
    **{f"per {over}": (_fp8, over) for over in ("token", "channel", "tensor")},
    "1 x 16, INT8": (_int8, 16),
    "per token, INT8": (_int8, "token"),
}


# --- measuring -------------------------------------------------------------------------------


def measure(layers: list[Recorded]) -> dict[str, Any]:
    """Errors by granularity: of what was recorded, and of norms with outliers."""
    norms = [norm for layer in layers for norm in norms_of(layer)]
    sites = [*norms, *map(mlp_of, layers)]
    recorded, outliers = {}, {}
    for name, kind in track(GRANULARITIES.items(), "coding"):
        keep = partial(_stored, *kind)
        size = sum(array.nbytes for array in keep(layers[-1].y)[1]) / layers[-1].y.size
        errors = _pooled([_errors(keep, site) for site in sites])
        recorded[name] = {"bytes": size, "errors": errors}
        outliers[name] = _pooled([_outlier_errors(keep, norm) for norm in norms])
    return {"recorded": recorded, "outliers": {"every token": {str(FACTOR): outliers}}}


def _outlier_errors(keep: Keep, norm: Site) -> Errors:
    """Errors of all but the largest channels, which are multiplied by the factor."""
    (x,) = norm.inputs
    largest = jnp.argsort(jnp.mean(x**2, axis=0))[-CHANNELS:]
    hit = jnp.zeros(x.shape, bool).at[:, largest].set(True)
    return _errors(keep, norm._replace(inputs=(jnp.where(hit, FACTOR * x, x),)), ~hit)


def _errors(keep: Keep, site: Site, where: Array | None = None) -> Errors:
    exact = site.backward(*site.inputs)
    ours = site.backward(*(keep(x)[0] for x in site.inputs))
    return {name: _rms(ours[name] - y, where) / _rms(y, where) for name, y in exact.items()}


def _pooled(sites: list[Errors]) -> Errors:
    """The root mean square over the sites that have an error of that name."""
    names = {name: None for errors in sites for name in errors}
    return {name: _rms(jnp.array([e[name] for e in sites if name in e])) for name in names}


def _rms(x: Array, where: Array | None = None) -> float:
    return float(jnp.sqrt(jnp.mean(x**2, where=where)))


def main() -> None:
    """Trains, measures, writes the results and prints errors in %."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of training")
    options = parser.parse_args()
    layers, training = record(options.steps)
    figures = measure([layers[number] for number in LAYERS])
    records.write(options.out / "granularity.json", {"training": training} | figures)
    for name, row in figures["recorded"].items():
        errors = (f"{of} {100 * error:.2f}" for of, error in row["errors"].items())
        print(f"{name:20} {row['bytes']:.3f} bytes, errors in %:", ", ".join(errors))


if __name__ == "__main__":
    main()
