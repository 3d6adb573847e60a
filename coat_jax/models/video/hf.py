"""Video transformers from and to the folders of diffusers, in both directions bit for bit.

A folder is `transformer/` of a Wan 2.1 pipeline, such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers. It does
not say how large videos are: `Config.latents` is that of 81 frames of 480 x 832 unless you replace
it. It has what `coat_jax.models.hf` has.
"""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from jax.typing import DTypeLike

from coat_jax.files import expand_user
from coat_jax.models import lazy_arrays
from coat_jax.models.hf import weights
from coat_jax.models.hf.config import Json, architecture_in, read_field, require_values
from coat_jax.models.hf.files import read_config_json, read_tensors
from coat_jax.models.hf.names import Tensors
from coat_jax.models.hf.weights import FILE_BYTES, Layout
from coat_jax.models.lazy_arrays import Name
from coat_jax.models.protocol import require_capability
from coat_jax.models.video.config import PRESETS, Config
from coat_jax.models.video.model import VideoTransformer
from coat_jax.precision import BF16

WAN = "WanTransformer3DModel"
ARCHITECTURES = (WAN,)
STEM = "diffusion_pytorch_model"
FIELDS = {
    "patch": "patch_size",
    "heads": "num_attention_heads",
    "head_dim": "attention_head_dim",
    "layers": "num_layers",
    "ffn": "ffn_dim",
    "channels": "in_channels",
    "text_width": "text_dim",
    "time_width": "freq_dim",
    "cross_norm": "cross_attn_norm",
    "norm_eps": "eps",
}
DEFAULTS = {  # what diffusers takes for an entry that is missing
    "patch_size": [1, 2, 2], "num_attention_heads": 40, "attention_head_dim": 128,
    "num_layers": 40, "ffn_dim": 13824, "in_channels": 16, "text_dim": 4096, "freq_dim": 256,
    "cross_attn_norm": True, "eps": 1e-6,
}  # fmt: skip
REQUIRED: dict[str, tuple[Any, ...]] = {
    "qk_norm": ("rms_norm_across_heads",),
    "added_kv_proj_dim": (None,),  # those of models that also read an image
    "image_dim": (None,),
    "pos_embed_seq_len": (None,),
}

_BIASED = {"up": "linear_1", "down": "linear_2"}
OUTSIDE: dict[Name, str] = {
    ("patch",): "patch_embedding.weight",
    ("patch_bias",): "patch_embedding.bias",
    ("layer_times",): "condition_embedder.time_proj.weight",
    ("layer_times_bias",): "condition_embedder.time_proj.bias",
    ("table",): "scale_shift_table",
    ("out",): "proj_out.weight",
    ("out_bias",): "proj_out.bias",
}
IN_LAYER: dict[Name, str] = {
    ("table",): "scale_shift_table",
    ("cross", "text_norm", "scale"): "norm2.weight",
    ("cross", "text_norm", "bias"): "norm2.bias",
    ("mlp", "up"): "ffn.net.0.proj.weight",
    ("mlp", "up_bias"): "ffn.net.0.proj.bias",
    ("mlp", "down"): "ffn.net.2.weight",
    ("mlp", "down_bias"): "ffn.net.2.bias",
}
for _part, (_ours, _theirs) in itertools.product(("text", "time"), _BIASED.items()):
    OUTSIDE[_part, _ours] = f"condition_embedder.{_part}_embedder.{_theirs}.weight"
    OUTSIDE[_part, f"{_ours}_bias"] = f"condition_embedder.{_part}_embedder.{_theirs}.bias"
for _part, _theirs in {"attention": "attn1", "cross": "attn2"}.items():
    for _ours, _one in {"query": "q", "key": "k", "value": "v", "out": "out.0"}.items():
        IN_LAYER[_part, _ours] = f"{_theirs}.to_{_one}.weight"
        IN_LAYER[_part, f"{_ours}_bias"] = f"{_theirs}.to_{_one}.bias"
    for _ours in ("query", "key"):
        IN_LAYER[_part, f"{_ours}_norm", "scale"] = f"{_theirs}.norm_{_ours[0]}.weight"


def tensors_of(path: Name, config: Config) -> Tensors:
    """The tensor of a parameter, or those of all layers if it is stacked."""
    if path[0] != config.STACK:
        return OUTSIDE[path]
    if isinstance(path[1], int):
        return f"blocks.{path[1]}.{IN_LAYER[path[2:]]}"
    return [f"blocks.{layer}.{IN_LAYER[path[1:]]}" for layer in range(config.layers)]


def is_transposed(tensor: str) -> bool:
    """Whether a tensor has the axes of its parameter in reverse: weights of products do."""
    return tensor.endswith(".weight") and "norm" not in tensor.split(".")[-2]


def read_config(folder: str | Path) -> Config:
    """The Config of a folder; it computes in the dtype of the stored weights, not in FP8."""
    path = expand_user(folder)
    data = read_config_json(path)
    architecture_in(data, ARCHITECTURES)
    data = {**DEFAULTS, **data}
    channels = {"out_channels": (data["in_channels"], None)}
    require_values("", data, {**{n: v for n, v in REQUIRED.items() if n in data}, **channels})
    data["patch_size"] = tuple(data["patch_size"])
    fields: dict[str, Any] = {
        ours: read_field(Config, ours, theirs, data[theirs]) for ours, theirs in FIELDS.items()
    }
    dtype = next(iter(read_tensors(path, stem=STEM).values())).dtype
    pairs = zip(PRESETS["wan2.1_1.3b"].latents, fields["patch"], strict=True)
    latents = tuple(count // side * side for count, side in pairs)
    return Config(latents=latents, precision=BF16, param_dtype=dtype, dtype=dtype, **fields)


def to_json(config: Config, dtype: Any) -> dict[str, Any]:
    """The config.json of a model."""
    del dtype
    data = {theirs: getattr(config, ours) for ours, theirs in FIELDS.items()}
    data["patch_size"] = list(config.patch)
    data |= {name: values[0] for name, values in REQUIRED.items()}
    return {"_class_name": WAN, **data, "out_channels": config.channels, "rope_max_seq_len": 1024}


LAYOUT = Layout(VideoTransformer, to_json, tensors_of, is_transposed, ("", ""), stem=STEM)
read = partial(weights.read, layout=LAYOUT)
write = partial(weights.write, layout=LAYOUT)


def load(
    folder: str | Path, config: Config | None = None, *, mesh: Mesh | None = None
) -> VideoTransformer:
    """The model in a folder; for the arguments see `coat.models.hf.load`."""
    config = read_config(folder) if config is None else config
    return lazy_arrays.load(config, read(folder, config), mesh=mesh, module=VideoTransformer)


def save(
    folder: str | Path,
    model: VideoTransformer,
    *,
    dtype: DTypeLike | None = None,
    extra: Json | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a folder for diffusers and `load`; for the arguments see `coat.models.hf.save`."""
    require_capability("hf.save(folder, model)", model, "patch", "layer_times")
    parameters = lazy_arrays.parameters_of(model)
    write(folder, model.config, parameters, dtype=dtype, extra=extra, file_bytes=file_bytes)
