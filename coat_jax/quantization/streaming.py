"""Quantization of a model that is in files: one parameter is in memory at a time.

    parameters, not in memory  ->  a folder as `save` writes it

The result is that of `quantize` and `save`, bit for bit.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from coat_jax.models import Config, hf, stored
from coat_jax.models.stored import Name, Parameters
from coat_jax.quantization import folders
from coat_jax.quantization.calibration import Ranges
from coat_jax.quantization.projections import inference_config, name_of
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
    progress: Callable[[int], object] = lambda size: None,
) -> dict[str, Scheme]:
    """Quantizes parameters one after another, and writes a quantized model.

    Args:
        folder: see `save`.
        config: of the model that is not quantized.
        parameters: of that model, in files or on devices.
        recipe: how its projections are quantized.
        ranges: of their inputs, from `calibrate`, where the recipe needs them.
        dtype: see `save`.
        extra: see `save`.
        file_bytes: see `save`.
        progress: called with the number of bytes read since its last call.

    Returns:
        The scheme of each quantized projection, by its path.
    """
    config = inference_config(config)
    parameters = stored.arranged(parameters, scan=False)
    stored.require_same(config, parameters)
    kind = np.dtype(config.param_dtype)
    in_kind = {name: stored.cast(one, kind) for name, one in parameters.items()}

    def weight_at(path: str) -> Array:
        return jnp.asarray(in_kind[name_of(path)].whole())

    schemes = choose_schemes(config, recipe, ranges, weight_at)
    _, state = abstract(config, schemes)
    shapes = {path: tuple(leaf.shape) for path, leaf in nnx.to_flat_state(state)}
    values = _values(
        in_kind,
        list(shapes),
        schemes,
        recipe,
        ranges,
        done=lambda name: progress(stored.size_of(parameters[name])),
    )
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
    done: Callable[[Name], object],
) -> Iterator[tuple[Name, np.ndarray]]:
    """The arrays of the quantized model at these paths, each made when it is asked for.

    `done` is called with each parameter whose arrays were taken.
    """
    made_of: dict[Name, list[Name]] = {}
    for path in paths:
        made_of.setdefault(folders.plain_name(path), []).append(path)
    for name, its_paths in made_of.items():
        projection, value = ".".join(map(str, name)), parameters[name].whole()
        scheme = schemes.get(projection)
        if scheme is None:
            (path,) = its_paths
            yield path, value
        else:
            rounded = round_weight(projection, jnp.asarray(value), scheme, recipe, ranges)
            for path in its_paths:
                yield path, np.asarray(getattr(rounded, str(path[-1])))
        done(name)
