"""Reads and writes Hugging Face folders of vision-language models; see `coat_jax.models.hf`."""

from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh
from jax.typing import DTypeLike

from coat_jax.files import expand_user, read_json
from coat_jax.models import lazy_arrays
from coat_jax.models.hf import weights
from coat_jax.models.hf.config import Json
from coat_jax.models.hf.files import read_config_json
from coat_jax.models.hf.weights import FILE_BYTES, Layout
from coat_jax.models.lazy_arrays import LazyArray, Name, Parameters
from coat_jax.models.protocol import require_capability
from coat_jax.models.vision_language.config import Config
from coat_jax.models.vision_language.hf import names
from coat_jax.models.vision_language.hf.config import LLAVA, family_of, from_json, to_json
from coat_jax.models.vision_language.model import VisionLanguage

# The older name, and the one that transformers writes, where it is one of several entries.
PREPROCESSOR, PROCESSOR, OF_IMAGES = (
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor",
)


def layout_of(config: Config) -> Layout:
    """How the parameters of a model are named in its family's folders."""
    family = family_of(config)
    return Layout(
        VisionLanguage,
        to_json,
        names.tensors_of,
        names.is_transposed,
        names.TIED[family],
        names.renamed if family == LLAVA else str,
    )


def read_config(folder: str | Path) -> Config:
    """The Config of a folder; it computes in the dtype of the stored weights, not in FP8."""
    path = expand_user(folder)
    preprocessor = None
    if (path / PREPROCESSOR).exists():
        preprocessor = read_json(path / PREPROCESSOR)
    elif (path / PROCESSOR).exists():
        preprocessor = read_json(path / PROCESSOR).get(OF_IMAGES)
    return from_json(read_config_json(path), preprocessor)


def load(
    folder: str | Path, config: Config | None = None, *, mesh: Mesh | None = None
) -> VisionLanguage:
    """The model in a folder; for the arguments see `coat.models.hf.load`."""
    config = read_config(folder) if config is None else config
    parameters = read(folder, config)
    return lazy_arrays.load(config, parameters, mesh=mesh, module=VisionLanguage)


def save(
    folder: str | Path,
    model: VisionLanguage,
    *,
    dtype: DTypeLike | None = None,
    extra: Json | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a folder for transformers and `load`; for the arguments see `coat.models.hf.save`."""
    require_capability("hf.save(folder, model)", model, "tower", "decoder")
    parameters = lazy_arrays.parameters_of(model)
    write(folder, model.config, parameters, dtype=dtype, extra=extra, file_bytes=file_bytes)


def read(folder: str | Path, config: Config) -> dict[Name, LazyArray]:
    """The parameters in a folder, to be read in parts, those of all layers stacked."""
    return weights.read(folder, config, layout_of(config))


def write(
    folder: str | Path,
    config: Config,
    parameters: Parameters,
    *,
    dtype: DTypeLike | None = None,
    extra: Json | None = None,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int], object] = lambda size: None,
) -> None:
    """Writes config.json, preprocessor_config.json and parameters, one piece at a time."""
    weights.write(
        folder,
        config,
        parameters,
        layout=layout_of(config),
        beside={PREPROCESSOR: config.tower.images.to_json()},
        dtype=dtype,
        extra=extra,
        file_bytes=file_bytes,
        progress=progress,
    )
