"""Quantization of a model that is in files: one parameter is in memory at a time.

    parameters, not in memory  ->  a folder as `save` writes it

The result is that of `quantize` and `save`, bit for bit.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from coat_jax.models import Config, hf, stored
from coat_jax.models.stored import Name, Parameters, Stored
from coat_jax.quantization import folders
from coat_jax.quantization.calibration import Ranges
from coat_jax.quantization.projections import computing
from coat_jax.quantization.quantize import abstract, choose_schemes, round_weight
from coat_jax.quantization.recipe import Recipe, Scheme


def save_quantized(
    folder: str | Path,
    config: Config,
    parameters: Parameters,
    recipe: Recipe,
    ranges: Ranges | None = None,
    *,
    dtype: DTypeLike | None = None,
    extra: Mapping[str, Any] | None = None,
    file_bytes: int = hf.FILE_BYTES,
) -> dict[str, Scheme]:
    """Quantizes parameters one after another, and writes a quantized model.

    Args:
        folder: see `save`.
        config: of the model that is not quantized.
        parameters: of that model, in files or on devices.
        recipe: what becomes of its projections.
        ranges: of their inputs, from `calibrate`, where the recipe needs them.
        dtype: see `save`.
        extra: see `save`.
        file_bytes: see `save`.

    Returns:
        What became of each projection; those left alone are not listed.
    """
    config = computing(config)
    parameters = stored.arranged(parameters, scan=False)
    stored.require_same(config, parameters)
    kind = np.dtype(config.param_dtype)
    parameters = {name: stored.cast(one, kind) for name, one in parameters.items()}

    def weight_at(path: str) -> Array:
        return jnp.asarray(_whole(parameters[_name(path)]))

    schemes = choose_schemes(config, recipe, ranges, weight_at)
    _, state = abstract(config, schemes)
    shapes = {path: tuple(leaf.shape) for path, leaf in nnx.to_flat_state(state)}
    values = _values(parameters, list(shapes), schemes, recipe, ranges)
    folders.write(
        folder, config, schemes, shapes, values, dtype=dtype, extra=extra, file_bytes=file_bytes
    )
    return schemes


def _values(
    parameters: Parameters,
    paths: list[Name],
    schemes: Mapping[str, Scheme],
    recipe: Recipe,
    ranges: Ranges | None,
) -> Iterator[tuple[Name, np.ndarray]]:
    """The arrays of the quantized model at these paths, each made when it is asked for."""
    made_of: dict[Name, list[Name]] = {}
    for path in paths:
        made_of.setdefault(folders.plain_name(path), []).append(path)
    for name, its_paths in made_of.items():
        scheme = schemes.get(".".join(map(str, name)))
        if scheme is None:
            (path,) = its_paths
            yield path, _whole(parameters[name])
            continue
        weight = jnp.asarray(_whole(parameters[name]))
        rounded = round_weight(".".join(map(str, name)), weight, scheme, recipe, ranges)
        for path in its_paths:
            yield path, np.asarray(getattr(rounded, str(path[-1])))


def _whole(one: Stored) -> np.ndarray:
    return one.read((slice(None),) * len(one.shape))


def _name(path: str) -> Name:
    """A projection's path as the name of its weight."""
    layers, layer, *rest = path.split(".")
    return (layers, int(layer), *rest)
