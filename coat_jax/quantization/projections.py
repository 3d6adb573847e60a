"""The projections of a Llama by their paths, and models in which they are modules.

layers.3.attention.query  .key  .value     multiply one input
layers.3.attention.out
layers.3.mlp.gate  .up                     multiply one input
layers.3.mlp.down
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from flax import nnx

from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.models import Config, Llama
from coat_jax.models.lazy_arrays import Name
from coat_jax.models.protocol import require_capability
from coat_jax.nn.modular import ModularAttention, make_modular
from coat_jax.numerics.four_bits import GROUP
from coat_jax.precision import BF16

# Projections of one input have one format, because vLLM fuses each line into one product.
SHARING = (
    ("attention.query", "attention.key", "attention.value"),
    ("attention.out",),
    ("mlp.gate", "mlp.up"),
    ("mlp.down",),
)
PROJECTIONS = [part for sharing in SHARING for part in sharing]

# Makes the module of a projection, from its path, its weight [K, N] and its bias.
Make = Callable[[str, nnx.Param, nnx.Param | None], nnx.Module]


def paths_of(config: Config) -> list[str]:
    """The paths of all projections."""
    return [path for group in groups_of(config) for path in group]


def name_of(path: str) -> Name:
    """A path as the name of the parameter, in a model whose layers are not stacked."""
    layers, layer, *rest = path.split(".")
    return (layers, int(layer), *rest)


def plain_name(path: Name) -> Name:
    """The name of the parameter, in a model that is not quantized, that an array is made of."""
    if len(path) < 5 or f"{path[2]}.{path[3]}" not in PROJECTIONS:
        return path
    return (*path[:3], f"{path[3]}_bias") if path[-1] == "bias" else path[:4]


def groups_of(config: Config) -> list[tuple[str, ...]]:
    """The paths of all projections, those of one input together."""
    return [
        tuple(f"layers.{i}.{name}" for name in names)
        for i in range(config.layers)
        for names in SHARING
    ]


def inference_config(config: Config) -> Config:
    """The config of the quantized model: layers in a list, and no FP8 besides the projections."""
    if config.experts is not None:
        raise UserError(
            f"A model with {config.experts.count} experts in a layer cannot be quantized or "
            "balanced: convert it without --to and --balance."
        )
    return dataclasses.replace(config, scan=False, remat=None, precision=BF16)


def unstack(model: Llama) -> Llama:
    """The model with its layers in a list, and nothing in FP8.

    Arrays are shared; those of stacked layers are copied.
    """
    require_quantizable(model)
    have = {path: leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}

    def value_of(path: Name) -> Any:
        return have[path] if path in have else have[path[0], *path[2:]][path[1]]

    graph, state = models.abstract(inference_config(model.config))
    flat = {path: leaf.replace(value_of(path)) for path, leaf in nnx.to_flat_state(state)}
    plain: Llama = nnx.merge(graph, nnx.from_flat_state(flat))
    return plain


def replace_projections(plain: Llama, make: Make) -> Llama:
    """`plain`, from `unstack`, with its projections replaced by modules."""
    for i, block in enumerate(plain.layers):
        for name in ("attention", "mlp"):
            path = f"layers.{i}.{name}"

            def of_layer(part: str, *params: Any, path: str = path) -> nnx.Module:
                return make(f"{path}.{part}", *params)

            make_modular(getattr(block, name), of_layer)
    return plain


def groups_without(config: Config, is_left: Callable[[str], bool]) -> list[list[str]]:
    """`groups_of`, without the projections that stay as they are."""
    groups = ([path for path in group if not is_left(path)] for group in groups_of(config))
    return [group for group in groups if group]


def require_int4_inputs(config: Config, paths: Iterable[str]) -> None:
    """Raises unless the inputs of these projections, which are to be in INT4, fill groups."""
    inputs = {"out": config.heads * config.head_dim, "down": config.ffn}
    names = {path.rpartition(".")[2] for path in paths}
    uneven = {n: k for n in sorted(names) if (k := inputs.get(n, config.width)) % GROUP}
    if uneven:
        listed = ", ".join(f"'*.{name}' ({inputs})" for name, inputs in uneven.items())
        raise UserError(
            f"INT4 has a scale for every {GROUP} inputs of a projection, and these have other "
            f"numbers of them: {listed}. Leave them as they are (--leave, or `leave` of a "
            "Recipe), or use FP8."
        )


def require_quantizable(model: Llama) -> None:
    """Raises unless the model is one that can be quantized."""
    require_capability("coat.quantization", model, "layers", "head_weight")
    if is_quantized(model):
        raise UserError("This model is already quantized. Use the one that it was made from.")


def is_quantized(model: Llama) -> bool:
    """Whether the projections of a model are modules."""
    return not model.config.scan and isinstance(model.layers[0].attention, ModularAttention)
