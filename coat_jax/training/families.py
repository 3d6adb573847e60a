"""The kinds of models that the trainer knows: a line for each.

A family's model keeps to `coat_jax.models.protocol`. Its data is opened by number: see
`data.Rows`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from coat_jax import models, validation
from coat_jax.errors import UserError
from coat_jax.models import Batch, ModelConfig, video, vision_language
from coat_jax.models.protocol import Work
from coat_jax.training.data import DataConfig, Rows, picture_rows, rows_of, videos
from coat_jax.training.data.pictures import PicturesConfig
from coat_jax.training.data.sources import Split
from coat_jax.validation import brief


class Family(NamedTuple):
    """A kind of model.

    Attributes:
        module: the class of the model.
        config: the class of its config.
        data: the class of its data's config.
        rows: opens the data of a split, from the configs of model and data, the split, the length
            of a sequence, and a seed.
        example: the shapes of a row, for programs that are compiled without data, from the run's
            config.
        hf: like `coat.models.hf`; None if the family has no Hugging Face format.
        work: the arithmetic for a token, from the run's config.
        is_text: whether the loss is a cross-entropy, which has a perplexity.
    """

    module: Callable[..., Any]
    config: type[ModelConfig]
    data: type[Any]
    rows: Callable[[Any, Any, Split, int, int], Rows]
    example: Callable[[Any], Any]
    hf: Any = None
    work: Callable[[Any], Work | None] = lambda run: run.model.work_per_token(run.sequence_length)
    is_text: bool = True


def _tokens(run: Any) -> Any:
    return jax.ShapeDtypeStruct((run.sequence_length,), jnp.int32)


def _pictures(run: Any) -> Any:
    size = run.model.tower.images.size
    return jax.ShapeDtypeStruct((run.data.pictures_per_row, size, size, 3), jnp.uint8)


def _video(run: Any) -> video.Batch:
    shapes = (*run.model.latents, run.model.channels), (run.data.text_tokens, run.model.text_width)
    latents, text = map(jax.ShapeDtypeStruct, shapes, (jnp.float32, jnp.bfloat16))
    scalars = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.uint32, jnp.bool_))
    return video.Batch(latents, text, *scalars)


def _work_with_pictures(run: Any) -> Work:
    """That of the decoder, and of the pictures for which each row has room."""
    of_text = run.model.work_per_token(run.sequence_length)
    share = run.data.pictures_per_row / run.sequence_length
    return Work(*(a + share * b for a, b in zip(of_text, run.model.work_per_image(), strict=True)))


FAMILIES = {
    "llama": Family(
        models.Llama,
        models.Config,
        DataConfig,
        rows=lambda model, data, split, sequence, seed: rows_of(
            data, split=split, sequence=sequence, vocab=model.vocab, seed=seed
        ),
        example=lambda run: Batch(_tokens(run), _tokens(run)),
        hf=models.hf,
    ),
    "vision_language": Family(
        vision_language.VisionLanguage,
        vision_language.Config,
        PicturesConfig,
        rows=lambda model, data, split, sequence, seed: picture_rows.rows_of(
            data, model, split=split, sequence=sequence, seed=seed
        ),
        example=lambda run: vision_language.Batch(
            *(_tokens(run), _tokens(run), _pictures(run), _tokens(run), _tokens(run))
        ),
        hf=vision_language.hf,
        work=_work_with_pictures,
    ),
    "video": Family(
        video.VideoTransformer,
        video.Config,
        videos.VideosConfig,
        rows=lambda model, data, split, sequence, seed: videos.rows_of(
            data, model, split=split, sequence=sequence
        ),
        example=_video,
        hf=video.hf,
        is_text=False,
    ),
}


def name_of(config: Any) -> str:
    """Returns the name of the family that a model's config belongs to."""
    for name, family in FAMILIES.items():
        if type(config) is family.config:
            return name
    known = ", ".join(f"{family.config.__name__} ({name})" for name, family in FAMILIES.items())
    raise UserError(
        f"model={brief(config)} must be the config of a model that the trainer knows: {known}. "
        "Published ones have names: models.config_of('llama2_7b')."
    )


def family_of(config: Any) -> Family:
    """Returns the family that a model's config belongs to."""
    return FAMILIES[name_of(config)]


def hf_of(config: Any) -> Any:
    """Returns the Hugging Face format of a config's family; raises if there is none."""
    name = name_of(config)
    if FAMILIES[name].hf is None:
        raise UserError(f"There is no Hugging Face format for models of the family {name!r}.")
    return FAMILIES[name].hf


def hf_named_in(config_json: Mapping[str, Any]) -> Any:
    """Returns the Hugging Face format of the architecture that a config.json names."""
    formats = [family.hf for family in FAMILIES.values() if family.hf is not None]
    format_of = {name: format for format in formats for name in format.ARCHITECTURES}
    return format_of[models.hf.architecture_in(config_json, format_of)]


def from_json(data: Any, where: str) -> ModelConfig:
    """Returns the config of a model from its JSON, which names the family."""
    fields = dict(data) if isinstance(data, dict) else {}
    name = fields.pop("family", None)
    if name not in FAMILIES:
        raise UserError(f"{where} has family={brief(name)}, and must have {' or '.join(FAMILIES)}.")
    return validation.from_json(FAMILIES[name].config, fields, where)
