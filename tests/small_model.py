"""A model so small that its programs compile in seconds, for tests of models and what uses them."""

import json

import jax
import numpy as np
import quick
from flax import nnx
from safetensors.numpy import load_file, save_file

from coat_jax import models

SMALL = models.Config(
    vocab=256,
    width=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=128,
    context=64,
    precision="bf16",
)
QUICK = quick.OPTIONS
FAMILIES = {
    "llama": {},
    "mistral": {"window": 8},
    "qwen2": {"qkv_bias": True, "tied": True},
    "qwen3": {"qk_norm": "head", "tied": True},
    "olmo": {"norm": "layer"},
    "olmo2": {"norms": "after", "qk_norm": "all"},
}


def change(folder, **entries):
    """Changes entries of a model's config.json, and takes the checksums away."""
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | entries))
    (folder / "manifest.json").unlink(missing_ok=True)


def files_of(folder):
    """Every tensor of a folder, by name."""
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def rewrite(folder, **changes):
    """Changes tensors of a folder; None removes one."""
    tensors = {**files_of(folder), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")
    (folder / "manifest.json").unlink(missing_ok=True)


def filled(config, seed=0, mesh=None, module=models.Llama):
    """A model with random parameters, scales and biases too, without compiling anything."""
    rng = np.random.default_rng(seed)
    graph, state = models.abstract(config, mesh=mesh, module=module)

    def draw(leaf):
        values = rng.standard_normal(leaf.shape) / np.sqrt(leaf.shape[-2:][0])
        # jnp.asarray compiles a program for each shape.
        return jax.device_put(values.astype(leaf.dtype), None if mesh is None else leaf.sharding)

    return nnx.merge(graph, jax.tree.map(draw, state))


def assert_same_model(got, wanted):
    """Bit for bit."""
    got, wanted = (dict(nnx.to_flat_state(nnx.state(model))) for model in (got, wanted))
    assert got.keys() == wanted.keys()
    for path, leaf in wanted.items():
        ours, theirs = np.asarray(got[path][...]), np.asarray(leaf[...])
        assert (ours.dtype, ours.tobytes()) == (theirs.dtype, theirs.tobytes()), path


def assert_same_files(one, other):
    """The same tensors in both folders, bit for bit."""
    one, other = files_of(one), files_of(other)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        theirs = other[name]
        assert (tensor.dtype, tensor.tobytes()) == (theirs.dtype, theirs.tobytes()), name
