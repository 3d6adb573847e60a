"""Images reach the decoder as features in order, and how all is computed changes nothing."""

import contextlib
import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from model_cases import AXES, automatic_mesh
from small_model import QUICK
from vision_cases import (
    CLIP_TOWER,
    FAMILIES,
    IMAGE,
    QWEN2,
    SMOLVLM,
    TOWER,
    batch_of,
    changed,
    filled,
    llava,
)

from coat_jax import COAT, COAT_LEAN, models, nn
from coat_jax.errors import UserError
from coat_jax.models import lazy_arrays
from coat_jax.models.vision_language import PRESETS, Batch, ImageFormat, VisionLanguage, config_of
from coat_jax.models.vision_language.tower import Unused, rounded_places

each_family = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)


def run(model, function, *args):
    graph, state = nnx.split(model)
    program = jax.jit(lambda s, *a: function(nnx.merge(graph, s), *a), compiler_options=QUICK)
    return jax.tree.map(np.asarray, program(state, *args))


def logits_of(model, *args):
    return run(model, lambda model, *args: model(*args), *args)


def by_name(model):
    """Every parameter, stacked layers and lists of layers alike."""
    found = lazy_arrays.arrange(lazy_arrays.parameters_of(model), scan=True)
    return {".".join(path): one.whole() for path, one in found.items()}


def abstract(config):
    return models.abstract(config, module=VisionLanguage)


# --- Images in the text ----------------------------------------------------------------------


@each_family
def test_features_take_the_places_of_image_tokens_in_order(config):
    """Of images one after the other and apart. No token asks for the last of each row."""
    n = config.features
    batch = batch_of(config, (3, "i", "i", 2, "i"), ("i", 5 + 2 * n))

    def parts(model, tokens, images):
        text = model.decoder.embed_tokens(tokens)
        return model.embed_tokens(tokens, images), model.features(images), text

    for x, features, text, tokens in zip(
        *run(filled(config), parts, batch.tokens, batch.images), batch.tokens, strict=True
    ):
        asked = tokens == IMAGE
        np.testing.assert_array_equal(x[asked], features[: asked.sum()])
        np.testing.assert_array_equal(x[~asked], text[~asked])
        assert len(np.unique(features, axis=0)) == len(features) == 4 * n


def test_rows_without_an_image_are_text_alone():
    model, batch = filled(SMOLVLM), batch_of(SMOLVLM, (20,), (20,))
    alone = logits_of(model.decoder, batch.tokens)
    np.testing.assert_array_equal(logits_of(model, batch), alone)


def test_only_the_images_of_a_row_change_its_logits():
    batch = batch_of(SMOLVLM, (3, "i", 4, "i"), ("i", 7 + SMOLVLM.features))
    model = filled(SMOLVLM)

    def logits_after_inverting(*image):
        inverted = batch.images.at[image].set(255 - batch.images[image])
        return logits_of(model, batch._replace(images=inverted))

    wanted = logits_of(model, batch)
    for image in ((0, 2), (1, 1), (1, 2)):
        np.testing.assert_array_equal(logits_after_inverting(*image), wanted)
    # The second image of the first row begins after 7 tokens and an image.
    row, other = logits_after_inverting(0, 1)
    first = 7 + SMOLVLM.features
    np.testing.assert_array_equal(row[:first], wanted[0, :first])
    assert (row[first:] != wanted[0, first:]).any(axis=-1).all()
    np.testing.assert_array_equal(other, wanted[1])


def test_documents_in_one_row_are_as_if_alone():
    n = SMOLVLM.features
    batch = batch_of(SMOLVLM, (5, "i", 6, "i"))
    first = np.arange(11 + 2 * n) < 5 + n
    places = np.where(first, np.arange(11 + 2 * n), np.arange(11 + 2 * n) - 5 - n)
    packed = batch._replace(positions=places[None], segments=np.where(first, 1, 2)[None])
    second = Batch(batch.tokens[:, ~first], batch.labels[:, ~first], batch.images[:, 1:2])
    model = filled(SMOLVLM)
    got, wanted = logits_of(model, packed)[:, ~first], logits_of(model, second)
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())
    assert np.abs(logits_of(model, batch)[:, ~first] - wanted).max() > 0.01 * np.abs(wanted).max()


def test_the_loss_is_the_cross_entropy_of_labelled_tokens():
    config = changed(SMOLVLM, decoder={"z_loss": 0.1})
    model, batch = filled(config), batch_of(config, (3, "i", 4), ("i", 7))
    logits, with_z, loss = run(
        model, lambda m, b: (m(b), m.loss(b), m.loss(b, evaluate=True)), batch
    )
    labelled = np.asarray(batch.labels >= 0)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, np.maximum(batch.labels, 0))
    assert loss.count == labelled.sum() == 14
    np.testing.assert_allclose(loss.sum, each[labelled].sum(), rtol=1e-5)
    assert with_z.sum > loss.sum


def test_an_image_of_another_size_is_refused():
    batch = batch_of(SMOLVLM, ("i", 4))
    with pytest.raises(ValueError, match=r"sees images \[images, 16, 16, 3\], not \(2, 8, 16, 3\)"):
        filled(SMOLVLM)(batch._replace(images=batch.images[:, :, :8]))


# --- The same numbers ------------------------------------------------------------------------


PLAIN = {"scan": True, "remat": None, "axes": nn.MeshAxes(), "batch_axes": ()}


@functools.cache
def answer(config, mesh=None):
    """The loss of a model on one batch, and its gradient by parameter."""
    parameters = lazy_arrays.parameters_of(filled(replace(config, **PLAIN)))
    model = lazy_arrays.load(config, parameters, mesh=mesh, module=VisionLanguage)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    n = config.features
    batch = batch_of(config, ("i", 3, "i", 2), (5, "i", n), (5 + 2 * n,), ("i", "i", 5))

    def loss(params, rest, batch):
        return nnx.merge(graph, params, rest).loss(batch).mean

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        program = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)
        value, gradients = program(params, rest, batch)
    return value, by_name(nnx.merge(graph, gradients, rest))


def assert_same_answer(got, wanted, tolerance):
    np.testing.assert_allclose(got[0], wanted[0], rtol=tolerance)
    assert set(got[1]) == set(wanted[1])
    for name, gradient in wanted[1].items():
        if name == "tower.layers.attention.key_bias":
            continue  # adds one number to all scores of a query, which softmax takes away again
        distance = np.linalg.norm(got[1][name] - gradient)
        assert distance <= tolerance * np.linalg.norm(gradient), name
        assert name.startswith("tower.unused.") or gradient.any(), name


@pytest.mark.costly
@pytest.mark.parametrize("family", ["SmolVLM", "all of CLIP"])
def test_scan_and_remat_do_not_change_the_gradients(family):
    """Sums in another order differ by some 2^-24 times the root of their length."""
    config = FAMILIES[family]
    assert_same_answer(answer(replace(config, scan=False, remat="layer")), answer(config), 1e-5)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("family", "precision", "tolerance"),
    # In FP8 another order of sums may round to the neighbouring number.
    [
        ("SmolVLM", "coat", 4e-2),
        ("CLIP and Llama", "bf16", 1e-5),
        ("SigLIP and Qwen2", "bf16", 1e-5),
    ],
)
def test_eight_devices_do_not_change_the_result(family, precision, tolerance):
    config = replace(FAMILIES[family], precision=precision)
    sharded = answer(replace(config, **AXES), automatic_mesh(2, 2, 2))
    assert_same_answer(sharded, answer(config), tolerance)


def test_the_embedding_of_the_image_token_is_not_learnt():
    _, gradients = answer(SMOLVLM)
    embed = gradients["decoder.embed"]
    assert not embed[IMAGE].any()
    assert embed[:IMAGE].any()


@pytest.mark.costly
def test_values_depend_on_the_seed_alone():
    """Neither on scan nor on the mesh, on which each device makes its own shards."""
    config, mesh = FAMILIES["CLIP and Llama"], automatic_mesh(2, 2, 2)
    unrolled = VisionLanguage(replace(config, scan=False), rngs=nnx.Rngs(jax.random.key(3)))
    wanted = by_name(unrolled)
    for scan in (True, False):
        sharded = replace(config, scan=scan, **AXES)
        model = models.create(sharded, seed=3, mesh=mesh, module=VisionLanguage)
        values = by_name(model)
        assert set(values) == set(wanted)
        for name, value in values.items():
            # XLA may fuse the last multiplication, which then rounds once.
            np.testing.assert_allclose(value, wanted[name], rtol=2**-22, err_msg=name)
        layers = model.tower.layers
        assert (layers if scan else layers[0]).mlp.up[...].sharding.spec[-2:] == ("fsdp", "tensor")
        assert model.tower.patch[...].sharding.spec == P(None, None, None, "fsdp")
        assert model.projector.down[...].sharding.spec == P(("tensor", "fsdp"), None)
        shapes = models.abstract(sharded, mesh=mesh, module=VisionLanguage)[1]
        assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, nnx.state(model))
    first, second = wanted["tower.layers.mlp.up"]
    assert not np.array_equal(first, second)


# --- What is saved, and what is not used -----------------------------------------------------


SIZES = {
    "so400m": (1152, 16, 4304, "gelu_tanh"),
    "SigLIP-B": (768, 12, 3072, "gelu_tanh"),
    "CLIP-L": (1024, 16, 4096, "quick_gelu"),
}


@pytest.mark.parametrize(
    ("name", "precision", "units"),
    [
        ("so400m", "bf16", 9.74),
        ("so400m", "coat", 7.05),
        ("SigLIP-B", "bf16", 10.01),
        ("SigLIP-B", "coat", 7.20),
        ("CLIP-L", "bf16", 10.01),
        ("CLIP-L", "coat", 7.20),
    ],
)
def test_a_block_saves_as_much_as_was_measured(name, precision, units):
    """In units of one activation in BF16. Images are so many that FP8 needs no padding."""
    sizes = dict(zip(("width", "heads", "ffn", "activation"), SIZES[name], strict=True))
    config = changed(SMOLVLM, tower=sizes, precision=precision, scan=False, dtype=jnp.bfloat16)
    (layer, _) = nnx.merge(*abstract(config)).tower.layers
    x = jax.ShapeDtypeStruct((2, 576, config.tower.width), jnp.bfloat16)
    np.testing.assert_allclose(nn.saved_bytes(layer, x) / (2 * x.size), units, rtol=0.02)


def test_unused_tensors_are_no_parameters_and_have_no_gradient():
    config = FAMILIES["SigLIP and Qwen2"]
    model, batch = filled(config), batch_of(config, ("i", 4))
    graph, params, unused = nnx.split(model, nnx.Param, Unused)
    assert not any("unused" in path for path, _ in nnx.to_flat_state(params))
    # Two layers of 16 tensors, a norm of 2, and a head of 11.
    assert len(nnx.to_flat_state(unused)) == 2 * 16 + 2 + 11
    gradients = jax.jit(jax.grad(lambda u, p, b: nnx.merge(graph, p, u).loss(b).mean))(
        unused, params, batch
    )
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("side", "same"), [(4, True), (25, False), (26, True), (27, True), (31, False), (32, True)]
)
def test_places_are_rounded_as_in_idefics3(side, same):
    places = rounded_places(side)
    assert np.array_equal(places, range(side**2)) == same
    assert 0 <= places.min() <= places.max() < side**2


# --- The config ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": COAT_LEAN},
        {"scan": False, "remat": "layer"},
        {"param_dtype": jnp.dtype(jnp.bfloat16), "dtype": jnp.dtype(jnp.bfloat16)},
        AXES,
    ],
)
def test_all_parts_are_computed_as_the_config_says(changes):
    config = replace(SMOLVLM, **changes)
    for part in (config.tower, config.decoder):
        assert {name: getattr(part, name) for name in changes} == changes
    assert changed(config, tower={"precision": "coat"}, decoder={"scan": True}) == config
    assert config != SMOLVLM


def test_a_tower_is_sharded_over_tensor_where_kernels_can_divide_its_ffn():
    for ffn, axes in ((64, AXES["axes"]), (48, nn.MeshAxes("fsdp")), (4304, nn.MeshAxes("fsdp"))):
        config = changed(SMOLVLM, tower={"ffn": ffn}, **AXES)
        assert (config.tower.axes, config.decoder.axes) == (axes, AXES["axes"])


def test_the_precision_of_the_tower_stays_where_it_is_named():
    config = replace(SMOLVLM, tower_precision="coat")
    assert (config.tower.precision, config.decoder.precision) == (COAT, SMOLVLM.precision)
    assert replace(config, precision="coat_lean").tower.precision == COAT
    assert replace(config, tower_precision=None) == SMOLVLM


@pytest.mark.parametrize(
    ("precision", "of_tower", "in_fp8"),
    [
        ("coat", None, {"tower", "projector", "decoder"}),
        ("coat", "bf16", {"projector", "decoder"}),
        ("bf16", "coat", {"tower"}),
    ],
)
def test_each_part_multiplies_and_saves_in_its_precision(precision, of_tower, in_fp8):
    config = changed(SMOLVLM, precision=precision, tower_precision=of_tower)
    graph, state = abstract(config)
    features = jax.ShapeDtypeStruct((2, config.tower.features, config.tower.width), jnp.float32)
    inputs = {
        "tower": jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.uint8),
        "projector": features,
        "decoder": jax.ShapeDtypeStruct((2, 16), jnp.int32),
    }
    found = set()
    for part, x in inputs.items():

        def total(state, x, part=part):
            return getattr(nnx.merge(graph, state), part)(x).sum()

        program = jax.jit(jax.grad(total)).lower(state, x).as_text()
        found |= {part} if "f8E4M3FN" in program else set()
    assert found == in_fp8


def test_presets_are_the_published_models():
    config = config_of("SmolVLM_256M")
    assert models.parameters_count(config, module=VisionLanguage) == 256_484_928
    assert (config.features, config.context, config.vocab) == (64, 8192, 49280)
    assert config_of(config) is config
    assert PRESETS["vlm_tiny"].features == 16


def test_the_work_for_an_image_is_that_of_its_products_and_their_gradients():
    """Of a product of [m, k] by [k, n] 2mkn; all but those of attention and patches may be FP8."""
    config = replace(CLIP_TOWER, precision="coat")
    tokens, width, ffn = 4**2 + 1, config.width, config.ffn
    linear = 2 * (8 * tokens * width**2 + 4 * tokens * width * ffn)
    attention, patches = 2 * 4 * tokens**2 * width, 2 * 4**2 * (3 * 4**2) * width
    assert config.work_per_image() == (3 * linear, 3 * attention + 2 * patches)
    in_bf16 = replace(config, precision="bf16").work_per_image()
    assert in_bf16 == (0, sum(config.work_per_image()))
    for projector, products in (
        (llava(config, precision="coat"), 2 * 4**2 * (width * 64 + 64 * 64)),
        (replace(SMOLVLM, precision="coat"), 2 * 2**2 * (4 * width) * 64),
    ):
        fp8, wide = projector.work_per_image()
        assert (fp8 - 3 * products, wide) == projector.tower.work_per_image()
        in_bf16 = replace(projector, tower_precision="coat", precision="bf16").work_per_image()
        assert in_bf16 == (fp8 - 3 * products, wide + 3 * products)


WITH_CLASS = replace(CLIP_TOWER, keeps_class_token=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(SMOLVLM, shuffle=3), "shuffle=3 must divide the 4 patches"),
        (lambda: replace(SMOLVLM, shuffle=0), "shuffle=0 must be a whole number from 1 to 64"),
        (lambda: replace(SMOLVLM, tower=WITH_CLASS), "shuffle=2 must .* no class token is kept"),
        (lambda: llava(TOWER, shuffle=2), "shuffle=2 needs projector='linear', not 'mlp'"),
        (lambda: replace(SMOLVLM, projector="conv"), "projector='conv' must be 'linear' or 'mlp'"),
        (lambda: replace(SMOLVLM, image_token=256), "image_token=256 is outside .* of 256"),
        (lambda: replace(SMOLVLM, image_token=-1), "image_token=-1 must be a whole number"),
        (lambda: replace(SMOLVLM, tower_precision="fp7"), "There is no precision 'fp7'"),
        (lambda: replace(SMOLVLM, tower=QWEN2), "tower=Config.* must be"),
        (lambda: replace(TOWER, patch=5), "images.size=16 must be a multiple of patch=5"),
        (lambda: replace(TOWER, images=ImageFormat(size=18)), "images.size=18 must be a multiple"),
        (lambda: replace(TOWER, width=33), "width=33 must be a multiple of heads=2"),
        (lambda: replace(TOWER, keeps_class_token=True), "needs class_token=True"),
        (lambda: replace(TOWER, activation="mish"), "activation='mish' must be one of silu"),
        (lambda: replace(TOWER, unused=("neck",)), "unused=.*'neck'.* must be"),
        (lambda: config_of("smolvlm"), "no vision-language model 'smolvlm'. Use one of vlm_tiny"),
    ],
)
def test_a_config_refuses_what_does_not_fit(make, message):
    with pytest.raises(UserError, match=message):
        make()
