"""Post-training quantization of a model, one parameter after another."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from coat_jax import models, ops
from coat_jax.errors import UserError
from coat_jax.models import Config, Llama
from coat_jax.models.creation import with_shardings
from coat_jax.models.lazy_arrays import Name, dotted_name
from coat_jax.nn.modular import Dense
from coat_jax.nn.quantized import QuantizedLinear
from coat_jax.numerics import eight_bits, four_bits, mesh_axes
from coat_jax.numerics.eight_bits import EightBits
from coat_jax.numerics.quantizer import Fit
from coat_jax.ops.quantized import WeightFormat
from coat_jax.printable import amount
from coat_jax.quantization import compensation
from coat_jax.quantization.calibration import Ranges, input_noise, input_scale
from coat_jax.quantization.projections import (
    groups_without,
    name_of,
    paths_of,
    replace_projections,
    require_int4_inputs,
    unstack,
)
from coat_jax.quantization.recipe import CANDIDATES, Recipe, Scheme

ParameterAt = Callable[[Name], Array | np.ndarray]


def quantize(model: Llama, recipe: Recipe, ranges: Ranges | None = None) -> Llama:
    """A model whose projections are in 8 or 4 bits.

    Its other arrays are those of `model`; of stacked layers they are copies.

    The result generates, and computes logits and losses; it cannot be trained.

    Args:
        model: any Llama, of any precision. Delete it to free the memory of its weights.
        recipe: how its projections are quantized.
        ranges: of their inputs, from `calibrate`, where the recipe needs them. Weights in INT4
            have less error with them (`compensation`).
    """
    plain = unstack(model)
    arrays = {name: leaf[...] for name, leaf in nnx.to_flat_state(nnx.state(plain))}
    schemes = choose_schemes(plain.config, recipe, ranges, arrays.__getitem__)
    return _quantize_projections(
        plain,
        schemes,
        lambda path, weight: round_weight(path, weight, schemes[path], recipe, ranges),
    )


def schemes_of(model: Llama) -> dict[str, Scheme]:
    """The scheme of each quantized projection of a model, by its path."""
    return {
        dotted_name(path): Scheme(layer.weight().format, layer.activations, layer.zero is not None)
        for path, layer in nnx.iter_modules(model)
        if isinstance(layer, QuantizedLinear)
    }


def abstract(
    config: Config, schemes: Mapping[str, Scheme], *, mesh: Mesh | None = None
) -> tuple[Any, Any]:
    """A quantized model without its numbers: its graph, and a state of shapes.

    Args:
        config: from `inference_config`.
        schemes: of the projections that are quantized.
        mesh: see `coat.models.abstract`.
    """
    mesh = jax.sharding.get_mesh() if mesh is None else mesh

    def empty(path: str, weight: Array) -> ops.Quantized:
        scheme, (inputs, outputs) = schemes[path], weight.shape
        one = jnp.ones((), jnp.float32) if scheme.activations == "static" else None
        if scheme.format != "int4":
            codes = jnp.zeros((outputs, inputs), eight_bits.DTYPES[scheme.format])
            return ops.Quantized(codes, jnp.ones(outputs, jnp.float32), one)
        groups = outputs, inputs // four_bits.GROUP
        scales = jnp.ones(groups, jnp.float32 if scheme.zeros else jnp.bfloat16)
        zero = jnp.zeros(groups, jnp.uint8) if scheme.zeros else None
        return ops.Quantized(jnp.zeros((outputs, inputs // 2), jnp.uint8), scales, one, zero)

    graph, state = models.abstract(config, mesh=mesh)
    with jax.set_mesh(mesh):
        shapes = nnx.eval_shape(
            lambda state: _quantize_projections(nnx.merge(graph, state), schemes, empty), state
        )
    graph, state = nnx.split(shapes)
    return graph, state if mesh.empty else with_shardings(state, mesh)


def _quantize_projections(
    plain: Llama,
    schemes: Mapping[str, Scheme],
    rounded: Callable[[str, Array], ops.Quantized],
) -> Llama:
    """`plain` with its projections that have a scheme replaced by their `rounded` weights."""

    def make(path: str, kernel: nnx.Param, bias: nnx.Param | None) -> nnx.Module:
        if path not in schemes:
            return Dense(kernel, bias)
        sharding = tuple(kernel.get_metadata().get("out_sharding") or ())
        weight, activations = rounded(path, kernel[...]), schemes[path].activations
        _require_whole_groups(path, weight, sharding)
        return QuantizedLinear(weight, bias, activations=activations, sharding=sharding)

    return replace_projections(plain, make)


def _require_whole_groups(path: str, weight: ops.Quantized, sharding: tuple[Any, ...]) -> None:
    """Raises if a mesh would cut a group of INT4."""
    parts = mesh_axes.shards(sharding[0], jax.sharding.get_abstract_mesh()) if sharding else 1
    if weight.format == "int4" and (groups := weight.scale.shape[1]) % parts:
        raise UserError(
            f"{path}: {groups * four_bits.GROUP} inputs in INT4 are {amount(groups, 'group')} of "
            f"{four_bits.GROUP}, which {parts} devices cannot share: {parts} must divide {groups}."
        )


# --- Parts -----------------------------------------------------------------------------------


def choose_schemes(
    config: Config, recipe: Recipe, ranges: Ranges | None, parameter_at: ParameterAt
) -> dict[str, Scheme]:
    """The scheme of each projection that a recipe quantizes; raises if the recipe does not fit.

    Args:
        config: of the model.
        recipe: for all projections.
        ranges: see `quantize`.
        parameter_at: reads a parameter, for a recipe that compares formats.
    """
    recipe.require_matches(paths_of(config))
    compensates = recipe.format == "int4" and ranges is not None
    if recipe.needs_calibration or compensates:
        for path in paths_of(config):
            found = (ranges or {}).get(path)
            lacks = found is None or (compensates and found.products is None)
            if lacks and not recipe.is_left(path):
                raise UserError(
                    f"format={recipe.format!r} with activations={recipe.activations!r} reads "
                    f"statistics of inputs, and there are none of {path}, or too few: pass what "
                    "calibrate() returns for this recipe."
                )
    schemes: dict[str, Scheme] = {}
    for group in groups_without(config, recipe.is_left):
        format = _format(group, recipe, ranges, parameter_at)
        schemes |= {path: Scheme(format, recipe.activations) for path in group}
    if recipe.format == "int4":
        require_int4_inputs(config, schemes)
    return schemes


def round_weight(
    path: str,
    weight: Float[ArrayLike, "K N"],
    scheme: Scheme,
    recipe: Recipe,
    ranges: Ranges | None,
) -> ops.Quantized:
    """The codes and scales of a projection's weight, and the scale of its input if it is static."""
    fit, percentile = recipe.fit, recipe.percentile
    weight, of_input = jnp.asarray(weight), (ranges or {}).get(path)
    if of_input is not None and of_input.columns.size != weight.shape[0]:
        raise UserError(
            f"The ranges of {path} are of an input with {of_input.columns.size} columns, and "
            f"its weight has {weight.shape[0]} inputs: they belong to another model."
        )
    if scheme.format == "int4" and of_input is not None:
        assert of_input.products is not None
        rounded = compensation.quantize_weight(weight, of_input.products)
    else:
        rounded = _round(weight, scheme.format, fit=fit, percentile=percentile)
    if not bool(jnp.isfinite(rounded.scale).all()):
        raise UserError(
            f"The weight {path} has a NaN or an infinity: its range is not finite. The model's "
            "parameters are damaged."
        )
    if scheme.activations != "static":
        return rounded
    assert of_input is not None
    static = jnp.float32(input_scale(of_input, scheme.input_format, recipe))
    return rounded._replace(input_scale=static)


def _format(
    paths: Sequence[str], recipe: Recipe, ranges: Ranges | None, parameter_at: ParameterAt
) -> WeightFormat:
    """The format of projections that multiply one input.

    Errors of x and w are independent, so the relative squared error of x w is about the sum of
    theirs; the format with the least has the highest signal-to-noise ratio.
    """
    if recipe.format != "mixed":
        return recipe.format
    weights = [jnp.asarray(parameter_at(name_of(path))) for path in paths]

    def noise(name: EightBits) -> float:
        errors = [_noise(w, name, recipe.fit, recipe.percentile) for w in weights]
        squares = [jnp.sum(jnp.square(w.astype(jnp.float32))) for w in weights]
        of_weights = float(sum(errors)) / max(float(sum(squares)), 1e-30)
        if not recipe.needs_calibration:
            return of_weights
        assert ranges is not None
        return of_weights + input_noise(ranges[paths[0]], name, recipe)

    return min(CANDIDATES, key=noise)


_round = jax.jit(ops.quantize_weight, static_argnames=("format", "fit", "percentile"))


@partial(jax.jit, static_argnames=("name", "fit", "percentile"))
def _noise(
    weight: Float[Array, "K N"], name: EightBits, fit: Fit, percentile: float
) -> Float[Array, ""]:
    """The squared error of rounding a weight."""
    scale = eight_bits.channel_scales(weight, name, fit, percentile)
    error = eight_bits.rounded(weight, scale, name) - weight.astype(jnp.float32)
    return jnp.sum(jnp.square(error))
