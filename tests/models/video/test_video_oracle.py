"""Wan 2.1 against diffusers: velocities of random models, and folders in both directions."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from flax import nnx
from small_model import assert_same_model

from coat_jax.errors import UserError
from coat_jax.models.video import Config, VideoTransformer, hf

torch = pytest.importorskip("torch")
wan = pytest.importorskip("diffusers.models.transformers.transformer_wan")
safetensors = pytest.importorskip("safetensors.numpy")
pytestmark = pytest.mark.oracle

CASES = [*itertools.product((True, False), ((1, 2, 2), (2, 1, 1)))]
TENSORS = "diffusion_pytorch_model.safetensors"
LATENTS = (4, 6, 8)


def theirs(folder, cross_norm=True, patch=(1, 2, 2)):
    """A model of diffusers with no parameter at its initial value, saved in a folder."""
    torch.manual_seed(0)
    model = wan.WanTransformer3DModel(
        patch_size=patch,
        num_attention_heads=2,
        attention_head_dim=44,
        in_channels=3,
        out_channels=3,
        text_dim=48,
        freq_dim=64,
        ffn_dim=100,
        num_layers=2,
        cross_attn_norm=cross_norm,
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(("cross_norm", "patch"), CASES)
def test_velocities_are_those_of_diffusers(cross_norm, patch, scan, tmp_path):
    model = theirs(tmp_path, cross_norm, patch)
    config = replace(hf.read_config(tmp_path), latents=LATENTS, scan=scan)
    random = np.random.default_rng(0)
    x = random.normal(size=(2, *LATENTS, 3)).astype(np.float32)
    text = random.normal(size=(2, 5, 48)).astype(np.float32)
    time = np.float32([0.2, 0.8])
    got = nnx.jit(hf.load(tmp_path, config))(x, text, time)
    with torch.no_grad():
        given = (torch.from_numpy(one) for one in (x.transpose(0, 4, 1, 2, 3), 1000 * time, text))
        wanted = model(*given).sample.numpy().transpose(0, 2, 3, 4, 1)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


def test_folders_are_written_as_diffusers_writes_them(tmp_path):
    theirs(tmp_path / "theirs")
    config = replace(hf.read_config(tmp_path / "theirs"), latents=LATENTS)
    model = hf.load(tmp_path / "theirs", config)
    for name, parts in (("whole", hf.FILE_BYTES), ("in_parts", 100_000)):
        hf.save(tmp_path / name, model, file_bytes=parts)
        again = hf.load(tmp_path / name, config)
        assert_same_model(again, model)
    both = (safetensors.load_file(tmp_path / name / TENSORS) for name in ("whole", "theirs"))
    ours, others = both
    assert ours.keys() == others.keys()
    for name, tensor in others.items():
        np.testing.assert_array_equal(ours[name], tensor)
    index = tmp_path / "in_parts" / f"{TENSORS}.index.json"
    assert index.exists()
    loaded = wan.WanTransformer3DModel.from_config(
        json.loads((tmp_path / "whole" / "config.json").read_text())
    )
    loaded.load_state_dict({n: torch.from_numpy(t) for n, t in ours.items()}, strict=True)


def test_a_new_model_is_written_and_read(tmp_path):
    config = Config(
        latents=LATENTS, heads=2, head_dim=32, layers=1, ffn=64, text_width=16, channels=4
    )
    model = VideoTransformer(config, rngs=nnx.Rngs(0))
    hf.save(tmp_path / "new", model)
    assert_same_model(hf.load(tmp_path / "new", config), model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('"added_kv_proj_dim": 64', "added_kv_proj_dim=64, which coat_jax does not support"),
        ('"qk_norm": null', "qk_norm=None"),
        ('"out_channels": 7', "out_channels=7"),
        ('"_class_name": "FluxTransformer2DModel"', "names the architecture 'FluxTransformer2DM"),
    ],
)
def test_other_models_are_refused(change, message, tmp_path):
    theirs(tmp_path)
    path = tmp_path / "config.json"
    name = change.split(":")[0]
    lines = [line for line in path.read_text().splitlines() if not line.strip().startswith(name)]
    path.write_text("\n".join([lines[0], f"  {change},", *lines[1:]]))
    with pytest.raises(UserError, match=message):
        hf.read_config(tmp_path)
