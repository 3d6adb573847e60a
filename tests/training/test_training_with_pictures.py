"""Models that see are trained by the loop that trains all others, their towers included."""

import contextlib
import functools
import json
import os
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_cases
from PIL import Image
from small_model import SMALL, files_of, filled
from train_cases import mesh_of, stepper

from coat_jax import COAT, COAT_LEAN, models
from coat_jax.errors import UserError
from coat_jax.models import vision_language
from coat_jax.models.vision_language import Config, ImageFormat, TowerConfig, VisionLanguage
from coat_jax.training.checkpoint import conversion, weights
from coat_jax.training.cluster.mesh import open_data
from coat_jax.training.config import CheckpointConfig, MeshConfig, TelemetryConfig
from coat_jax.training.config_files import load_config, source
from coat_jax.training.data import PicturesConfig
from coat_jax.training.families import family_of
from coat_jax.training.loop import train
from coat_jax.training.overrides import fields, override
from coat_jax.training.report import accounting
from coat_jax.training.report.metrics import Metrics
from coat_jax.training.setup import prepare, require_same_model

STEPS, PEAKS = 6, (1e12, 2e12)
TOWER = TowerConfig(
    images=ImageFormat(size=8, resize="longest", longest_edge=32, resample="lanczos"),
    patch=4,
    width=32,
    layers=2,
    heads=2,
    ffn=64,
    last_norm=True,
    rounded_places=True,
)
MODEL = Config(tower=TOWER, decoder=replace(SMALL, layers=1), image_token=255)
IN_FP32 = replace(MODEL, precision="bf16", dtype=jnp.float32)


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """Conversations about two pictures, one, or none."""
    folder = tmp_path_factory.mktemp("talks")
    lines = []
    for number in range(12):
        shades = [20 * number, 255 - 20 * number][: number % 3]
        content = [{"type": "text", "text": f"{number}?"}]
        for shade in shades:
            name = f"{shade}.png"
            Image.new("RGB", (9, 12), (shade, 100, 255 - shade)).save(folder / name)
            content.append({"type": "image", "image": name})
        answer = {"role": "assistant", "content": " ".join(map(str, shades))}
        lines.append({"messages": [{"role": "user", "content": content}, answer]})
    file = folder / "talks.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def config_of(talks, out="unused", **changes):
    data = PicturesConfig(
        train=(str(talks),),
        template="{role}: {content}{end}",
        held_out_part=0.2,
        pictures_per_row=2,
    )
    usual = {"model": MODEL, "data": data, "mesh": MeshConfig(data=-1, fsdp=1), "out": str(out)}
    sizes = {"total_steps": STEPS, "global_batch_size": 8, "sequence_length": 48}
    return replace(train_cases.SMALL, **usual | sizes | changes)


def records_of(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


# --- Runs ------------------------------------------------------------------------------------


def losses_of(records):
    """And gradient norms."""
    names = ("step", "loss", "gradient_norm", "held_out_loss")
    found = [{name: one[name] for name in names if name in one} for one in records]
    return [one for one in found if len(one) > 1]


def test_a_run_that_stops_and_goes_on_has_the_losses_of_one_that_does_not(
    talks, tmp_path, monkeypatch
):
    """Bit for bit."""
    write = Metrics.write

    def write_and_stop(metrics, record):
        write(metrics, record)
        if "loss" in record and record["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    config = config_of(talks, tmp_path / "run", model=IN_FP32)
    train(replace(config, out=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "write", write_and_stop)
        outcome = train(config)
    assert outcome.stopped
    assert 2 <= outcome.step < STEPS
    assert train(config).step == STEPS
    wanted = losses_of(records_of(tmp_path / "whole"))
    assert losses_of(records_of(tmp_path / "run")) == wanted
    assert np.isfinite([value for one in wanted for value in one.values()]).all()
    assert [one["step"] for one in wanted] == [1, 2, 3, 4, 5, 6]


def test_the_seed_decides_the_order_of_the_conversations(talks):
    def first_batch(seed):
        with contextlib.closing(
            open_data(config_of(talks, seed=seed), mesh_of((1, 1, 1)), "train")
        ) as data:
            return next(data)

    one, other, again = map(first_batch, (0, 1, 0))
    assert not np.array_equal(one.images, other.images)
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert one.images.shape == (8, 2, 8, 8, 3)


def test_telemetry_names_the_tensors_of_all_parts(talks, tmp_path):
    run = config_of(talks, tmp_path / "run", telemetry=TelemetryConfig(every=2))
    train(replace(run, total_steps=2))
    records = records_of(tmp_path / "run")
    (found,) = [record for record in records if any(key.startswith("fp8/") for key in record)]
    for name in (
        "tower/layers/0/attention/query/weight/error",
        "tower/layers/1/mlp/up/gradient/underflow",
        "tower/layers/1/mlp/down/input/saturated",
        "projector/input/error",
        "decoder/layers/0/mlp/gate/weight/error",
        "decoder/embed/mu/k",
    ):
        assert np.isfinite(found[f"fp8/{name}"])


def test_the_work_of_a_step_includes_the_pictures_of_each_row(talks):
    """A product of [m, k] and [k, n] is 2mkn, and the backward pass has two more of the size."""
    run = config_of(talks)
    of_text, of_tower = run.model.decoder.work_per_token(48), TOWER.work_per_image()
    projector = 3 * 2 * 4 * 32 * 64
    fp8 = of_text.fp8 + 2 / 48 * (of_tower.fp8 + projector)
    wide = of_text.wide + 2 / 48 * of_tower.wide
    assert family_of(run.model).work(run) == pytest.approx((fp8, wide))
    run = replace(run, model=replace(MODEL, precision="bf16", tower_precision="coat"))
    fp8, wide = of_tower.fp8, sum(of_text) * 48 / 2 + projector + of_tower.wide
    assert family_of(run.model).work(run) == pytest.approx((2 / 48 * fp8, 2 / 48 * wide))


# --- From a folder of Hugging Face -----------------------------------------------------------


LLAVA = replace(
    IN_FP32,
    tower=replace(
        TOWER,
        images=ImageFormat(size=8, resize="crop"),
        last_norm=False,
        rounded_places=False,
        class_token=True,
        first_norm=True,
        patch_bias=False,
        unused=("layer", "last_norm"),
    ),
    projector="mlp",
)
UNUSED = "vision_tower.vision_model.encoder.layers.2.", "vision_tower.vision_model.post_layernorm."


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A LLaVA, with a layer that is not used and the norm after it."""
    folder = tmp_path_factory.mktemp("llava")
    vision_language.hf.save(folder, filled(LLAVA, module=VisionLanguage))
    return folder


@pytest.mark.costly
@pytest.mark.parametrize("frozen", [(), ("tower.*",)], ids=["all", "frozen tower"])
def test_unused_tensors_and_a_frozen_tower_are_exported_bit_for_bit(frozen, llava, talks, tmp_path):
    """They have no moments. Everything else is trained, but for the image token's embedding."""
    model = replace(weights.model_config(llava), precision="coat")
    config = config_of(
        talks,
        tmp_path / "run",
        model=model,
        init_from=str(llava),
        frozen=frozen,
        total_steps=2,
        checkpoint=CheckpointConfig(every=2),
    )
    train(config)
    conversion.convert(tmp_path / "run", tmp_path / "out", note=str)
    before, after = files_of(llava), files_of(tmp_path / "out")
    assert before.keys() == after.keys()
    same = {name for name in before if before[name].tobytes() == after[name].tobytes()}
    prefixes = ("vision_tower.",) if frozen else UNUSED
    assert same == {name for name in before if name.startswith(prefixes)}
    assert len([name for name in same if name.startswith(UNUSED)]) == 16 + 2

    moments = prepare(config, mesh_of((1, 1, 1))).abstract.moments
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(moments)}
    assert any("projector" in path for path in paths)
    assert not any("unused" in path for path in paths)
    assert any("tower" in path for path in paths) == (not frozen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tower": {"width": 64}}, "tower.width is 32 there and 64 in the config. Make"),
        ({"decoder": {"ffn": 256}}, "decoder.ffn is 128 there and 256 in the config. Make"),
        ({"image_token": 7}, "image_token is 255 there and 7 in the config. Make"),
        (
            {"tower": {"layers": 3}, "decoder": {"tied": True}},
            "tower.layers is 2 there and 3 .*; decoder.tied is False there and True in",
        ),
        ({"tower": {"unused": ("last_norm",)}}, r"tower.unused is \('layer', 'last_norm'\) there"),
    ],
)
def test_another_model_in_a_folder_is_refused_and_its_part_named(changes, message, llava):
    parts = {k: replace(getattr(LLAVA, k), **v) for k, v in changes.items() if type(v) is dict}
    with pytest.raises(UserError, match=f"llava0 holds another model: {message}"):
        require_same_model(str(llava), replace(LLAVA, **changes | parts))


def test_what_a_run_chooses_may_differ_and_the_family_may_not(llava, tmp_path):
    chosen = {"scan": False, "remat": "layer", "param_dtype": jnp.bfloat16}
    decoder = replace(LLAVA.decoder, context=32, z_loss=0.1)
    chosen |= {"precision": "coat", "tower_precision": "coat_lean", "decoder": decoder}
    require_same_model(str(llava), replace(LLAVA, **chosen))
    models.hf.save(tmp_path, filled(SMALL))
    for folder, model, kinds in (
        (llava, SMALL, "vision_language and llama"),
        (tmp_path, LLAVA, "llama and vision_language"),
    ):
        with pytest.raises(UserError, match=f"have models of different families: {kinds}"):
            require_same_model(str(folder), model)


# --- How it is computed ----------------------------------------------------------------------


@functools.cache
def losses(talks, sizes, parts):
    """Of three steps, in FP32."""
    optimizer = replace(train_cases.SMALL.optimizer, name="adamw")
    config = config_of(talks, model=IN_FP32, optimizer=optimizer, gradient_accumulation_steps=parts)
    run = stepper(config, sizes)
    with contextlib.closing(open_data(config, run.mesh, "train")) as data:
        _, reports = run.run([next(data) for _ in range(3)])
    assert len({int(report.labels) for report in reports}) > 1
    return [float(report.loss) for report in reports]


@pytest.mark.parametrize(("sizes", "parts"), [((1, 1, 1), 2), ((2, 2, 2), 1)])
def test_neither_microbatches_nor_a_mesh_change_the_losses(sizes, parts, talks):
    """For the tolerances see test_step.py."""
    found, wanted = losses(talks, sizes, parts), losses(talks, (1, 1, 1), 1)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_the_account_of_memory_has_every_picture_of_a_row(talks):
    """Each of two layers saves in BF16 x twice, q, k, v and o, and up, which is twice as wide."""

    def saved(count, rows=4, precision="bf16"):
        run = config_of(talks, model=replace(MODEL, precision=precision))
        run = replace(run, data=replace(run.data, pictures_per_row=count))
        return accounting.saved_activations(run, rows)

    one, two, three = map(saved, (1, 2, 3))
    x = 2 * 4 * 4 * 32  # in BF16, of four rows
    assert two - one == three - two > 2 * 8 * x
    assert saved(2, precision="coat") - saved(1, precision="coat") < 0.8 * (two - one)
    assert saved(2, rows=8) == pytest.approx(2 * two, abs=64)


def test_gradients_cannot_be_released():
    release = replace(train_cases.SMALL.optimizer, release_gradients=True)
    run = load_config("vlm_tiny")
    with pytest.raises(
        UserError, match=r"release_gradients=True .* VisionLanguage has no"
    ) as refused:
        replace(run, model=replace(run.model, scan=False), optimizer=release)
    assert "\n" not in str(refused.value)


# --- The command line ------------------------------------------------------------------------


def parts_of(config):
    model = config.model
    return {
        "precision": (model.tower.precision, model.decoder.precision),
        "dtype": (model.tower.param_dtype.name, model.decoder.param_dtype.name),
        "layers": (model.tower.layers, model.decoder.layers),
    }


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("--precision coat_lean", {"precision": (COAT_LEAN, COAT_LEAN)}),
        ("--tower_precision coat_lean", {"precision": (COAT_LEAN, COAT)}),
        ("--param_dtype bfloat16", {"dtype": ("bfloat16", "bfloat16")}),
        ("--decoder.layers 3", {"layers": (2, 3)}),
        ("--model.tower.layers 3", {"layers": (3, 2)}),
        ("--tower_precision coat_lean --tower_precision none", {}),
    ],
)
def test_a_field_of_a_part_and_of_all_parts_may_be_set(line, changes):
    config = load_config("vlm_tiny")
    found = override(config, line.split())
    assert parts_of(found) == parts_of(config) | changes
    names = {}
    exec(source(found), names)
    assert names["config"]() == found


def test_parts_have_no_precision_of_their_own_to_set_and_layers_are_of_one():
    config = load_config("vlm_tiny")
    for line, message in (
        ("--decoder.precision bf16", "no field 'decoder.precision'"),
        ("--model.tower.scan false", "no field 'model.tower.scan'"),
        ("--layers 3", "may mean any of --model.tower.layers, --model.decoder.layers"),
    ):
        with pytest.raises(UserError, match=message):
            override(config, line.split())
    assert all(field.sentence for field in fields(config))
