"""Weights from and to Hugging Face folders, in both directions bit for bit.

    model = coat.models.hf.load("Llama-3.1-8B", mesh=mesh)
    coat.models.hf.save("out", model, dtype=jnp.bfloat16)

    config = dataclasses.replace(hf.read_config(folder), precision="coat", remat="layer")
    model = hf.load(folder, config)

One parameter at a time is in host memory; on a mesh, each device reads its own part. A weight
is [outputs, inputs] in the files and [inputs, outputs] here. Tokenizers are left out.
"""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from coat_jax.models.config import Config
from coat_jax.models.creation import abstract
from coat_jax.models.hf_config import from_json, to_json
from coat_jax.models.hf_files import Entry, Tensors, write
from coat_jax.models.llama import Llama

CONFIG = "config.json"
OUTSIDE = {
    ("embed",): "model.embed_tokens.weight",
    ("norm", "scale"): "model.norm.weight",
    ("head",): "lm_head.weight",
}
IN_LAYER = {
    ("attention", "norm", "scale"): "input_layernorm.weight",
    ("attention", "query"): "self_attn.q_proj.weight",
    ("attention", "key"): "self_attn.k_proj.weight",
    ("attention", "value"): "self_attn.v_proj.weight",
    ("attention", "query_bias"): "self_attn.q_proj.bias",
    ("attention", "key_bias"): "self_attn.k_proj.bias",
    ("attention", "value_bias"): "self_attn.v_proj.bias",
    ("attention", "query_norm", "scale"): "self_attn.q_norm.weight",
    ("attention", "key_norm", "scale"): "self_attn.k_norm.weight",
    ("attention", "out"): "self_attn.o_proj.weight",
    ("attention_norm", "scale"): "post_attention_layernorm.weight",
    ("mlp", "norm", "scale"): "post_attention_layernorm.weight",
    ("mlp", "gate"): "mlp.gate_proj.weight",
    ("mlp", "up"): "mlp.up_proj.weight",
    ("mlp", "down"): "mlp.down_proj.weight",
    ("mlp_norm", "scale"): "post_feedforward_layernorm.weight",
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FILE_BYTES = 5 * 10**9


def read_config(folder: str | Path) -> Config:
    """The Config of a folder's config.json; its dtypes are those of the weights."""
    path = Path(folder) / CONFIG
    if not path.exists():
        raise FileNotFoundError(f"There is no {path}.")
    return from_json(json.loads(path.read_text("utf-8")))


def load(folder: str | Path, config: Config | None = None, *, mesh: Mesh | None = None) -> Llama:
    """The model in a folder.

    Args:
        folder: with config.json and safetensors files.
        config: what to make of it; by default what config.json says. A variant of that may
            have other dtypes (the weights are cast), precision, axes, scan or remat.
        mesh: to load it onto; by default the one that is set, if any.
    """
    config = read_config(folder) if config is None else config
    graph, state = abstract(config, mesh=mesh)
    tensors = Tensors(Path(folder))
    flat = dict(nnx.to_flat_state(state))
    sources = {path: _source(path, leaf.shape, config) for path, leaf in flat.items()}
    _require_names(sources.values(), tensors, config)
    for source in sources.values():
        _require_shapes(source, tensors)
    for path, leaf in flat.items():
        flat[path] = leaf.replace(_read(sources[path], tensors, leaf))
    return nnx.merge(graph, nnx.from_flat_state(flat))


def save(
    folder: str | Path,
    model: Llama,
    *,
    dtype: DTypeLike | None = None,
    extra: Mapping[str, Any] | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes config.json and the weights, for transformers and for `load`.

    Args:
        folder: without a model in it; made if it is not there.
        model: the model.
        dtype: of the weights in the files; that of the parameters by default.
        extra: entries of config.json that a Config does not have, such as eos_token_id.
        file_bytes: how large a file may become.
    """
    folder, config = Path(folder), model.config
    stored = jnp.dtype(config.param_dtype if dtype is None else dtype)
    data = {**to_json(config, stored), **(extra or {})}
    entries = []
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        value = leaf[...]
        if not value.is_fully_addressable:
            raise ValueError(
                f"{'.'.join(map(str, path))} is spread over several hosts. Save a checkpoint with "
                "orbax, and convert that on one host."
            )
        source = _source(path, value.shape, config)
        for i, name in enumerate(source.names):
            shape = source.shape[::-1] if source.transposed else source.shape
            entries.append(Entry(name, shape, partial(_fetch, source, value, i)))
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, sorted(entries, key=_file_order), stored, file_bytes)
    (folder / CONFIG).write_text(json.dumps(data, indent=2) + "\n", "utf-8")


class _Source(NamedTuple):
    """Where a parameter comes from: one tensor, or one per layer, stacked."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # of the parameter, or of one layer of it
    stacked: bool
    transposed: bool


def _source(path: tuple[Any, ...], shape: tuple[int, ...], config: Config) -> _Source:
    if path[0] != "layers":
        return _Source((OUTSIDE[path],), shape, False, path == ("head",))
    if config.scan:
        name = IN_LAYER[path[1:]]
        names = tuple(f"model.layers.{i}.{name}" for i in range(config.layers))
        return _Source(names, shape[1:], True, len(shape) == 3)
    name = f"model.layers.{path[1]}.{IN_LAYER[path[2:]]}"
    return _Source((name,), shape, False, len(shape) == 2)


def _read(source: _Source, tensors: Tensors, leaf: Any) -> jax.Array:
    """A parameter, each device's part of it by itself."""

    def part(index: Any) -> np.ndarray:
        layers, inner = (index[0], index[1:]) if source.stacked else (slice(None), index)
        there = inner[::-1] if source.transposed else inner
        sizes = [len(range(*s.indices(n))) for s, n in zip(inner, source.shape, strict=True)]
        names = source.names[layers]
        values = np.empty((len(names), *sizes), leaf.dtype)
        for i, name in enumerate(names):
            tensor = tensors.read(name, there)
            values[i] = tensor.T if source.transposed else tensor
        return values if source.stacked else values[0]

    if leaf.sharding is None:
        return jax.device_put(part((slice(None),) * len(leaf.shape)))
    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def _fetch(source: _Source, value: jax.Array, layer: int) -> np.ndarray:
    """One tensor of a parameter, as the files have it."""
    tensor = np.asarray(value[layer] if source.stacked else value)
    return tensor.T if source.transposed else tensor


def _file_order(entry: Entry) -> tuple[int, str]:
    """The embedding, the layers in order, the rest."""
    parts = entry.name.split(".")
    if parts[1] == "layers":
        return int(parts[2]), entry.name
    return (-1 if entry.name == EMBEDDING else 10**9), entry.name


def _require_names(sources: Iterable[_Source], tensors: Tensors, config: Config) -> None:
    """Raises unless the folder has the tensors that the model needs, and no others."""
    needed = {name for source in sources for name in source.names}
    # Old checkpoints store the rotary frequencies too, which follow from the Config.
    there = {name for name in tensors.names() if not name.endswith("rotary_emb.inv_freq")}
    if config.tied and HEAD in there:
        there.remove(HEAD)
        _require_equal(tensors)
    for kind, names in (("lacks", needed - there), ("has unexpected", there - needed)):
        if names:
            listed = ", ".join(sorted(names)[:5])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise ValueError(
                f"{tensors.folder} {kind} tensors: {listed}{more}. Its config.json or the Config "
                "describes another model."
            )


def _require_equal(tensors: Tensors) -> None:
    everything = (slice(None), slice(None))
    head, embedding = (tensors.read(name, everything) for name in (HEAD, EMBEDDING))
    if head.shape != embedding.shape or not np.array_equal(head, embedding):
        raise ValueError(
            f"config.json of {tensors.folder} ties head and embedding, and {HEAD} differs from "
            f"{EMBEDDING}. Load it with a Config of tied=False."
        )


def _require_shapes(source: _Source, tensors: Tensors) -> None:
    shape = source.shape[::-1] if source.transposed else source.shape
    for name in source.names:
        if tensors.shape(name) != shape:
            raise ValueError(
                f"{name} in {tensors.folder} is {tensors.shape(name)}, and the Config says {shape}."
            )
