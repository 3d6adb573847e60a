"""Pictures as pixels: those of transformers, or an error that says what is wrong."""

import importlib.metadata
import io
import json
import os
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from coat_jax.errors import UserError
from coat_jax.models.vision_language.images import (
    CLIP_MEAN,
    CLIP_STD,
    MAX_PIXELS,
    PROCESSORS,
    ImageFormat,
    load,
    read_header,
)

WHERE = "chat.jsonl:12"
FORMATS = [
    ImageFormat(),
    ImageFormat(size=37, resample="bilinear", mean=(0.1, 0.2, 0.3), std=(1, 2, 3)),
    ImageFormat(size=336, resize="crop", mean=CLIP_MEAN, std=CLIP_STD),
    ImageFormat(size=31, resize="crop", resample="lanczos"),
    ImageFormat(size=512, resize="longest", longest_edge=2048, resample="lanczos"),
    ImageFormat(size=49, resize="longest", longest_edge=133, resample="lanczos"),
    ImageFormat(size=16, resize="longest", longest_edge=365, resample="bicubic"),
]
SQUASH, _, CROP, _, LONGEST, *_ = FORMATS
each_format = pytest.mark.parametrize(
    "images", FORMATS, ids=lambda images: f"{images.resize}-{images.size}"
)
SIDEWAYS = 6  # EXIF: the top row of the file is the right column of the picture


def noise(height, width, channels=3):
    return np.random.default_rng(0).integers(0, 256, (height, width, channels), np.uint8)


def write_noise(path, **options):
    Image.fromarray(noise(45, 70)).save(path, **options)
    return path


# --- Against transformers ----------------------------------------------------------------------


def pixels_of_transformers(images, picture):
    transformers = pytest.importorskip("transformers")
    settings = images.to_json()
    kind = getattr(transformers, settings.pop("image_processor_type") + "Pil")
    processor = kind(**settings, return_row_col_info=False)
    batch = processor(picture, do_rescale=False, do_normalize=False, return_tensors="np")
    return np.moveaxis(batch["pixel_values"].reshape(3, images.size, images.size), 0, 2)


def pictures_of_scikit_image():
    try:
        files = importlib.metadata.files("scikit-image")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("scikit-image is not installed")
    kinds = (".png", ".jpg", ".gif", ".tif")
    # Pillow cannot read the pages of the other one.
    return [
        file.locate() for file in files if file.suffix in kinds and file.name != "multipage_rgb.tif"
    ]


@pytest.mark.oracle
@each_format
def test_pixels_of_photographs_are_those_of_transformers(images):
    paths = pictures_of_scikit_image()
    assert len(paths) > 20
    for path in paths:
        found = read_header(path.name, images, root=path.parent, where=WHERE)
        with Image.open(path) as picture:
            wanted = pixels_of_transformers(images, picture)
        got = load(found, images, WHERE)
        np.testing.assert_array_equal(got, wanted, err_msg=path.name)


def transparent(mode, **options):
    """A picture and how to save it: of its colors, those of the first pixel are transparent."""
    picture = Image.fromarray(noise(45, 70)).convert(mode)
    return picture, {"transparency": picture.getpixel((0, 0)), **options}


MODES = {
    "RGB.jpg": (Image.fromarray(noise(45, 70)), {}),
    "RGB.ppm": (Image.fromarray(noise(45, 70)), {}),
    "RGB.bmp": (Image.fromarray(noise(45, 70)), {}),
    "RGB.tif": (Image.fromarray(noise(45, 70)), {"compression": "tiff_lzw"}),
    "CMYK.jpg": (Image.fromarray(noise(45, 70, 4), "CMYK"), {}),
    "L.png": (Image.fromarray(noise(45, 70)).convert("L"), {}),
    "1.png": (Image.fromarray(noise(45, 70)).convert("1"), {}),
    "16.png": (Image.fromarray(noise(45, 70, 2).view(np.uint16)[..., 0] // 64), {}),
    "P.png": (Image.fromarray(noise(45, 70)).convert("P"), {}),
    "P-transparent.png": transparent("P"),
    "P-alphas.png": (Image.fromarray(noise(45, 70)).convert("P"), {"transparency": bytes(200)}),
    "P-transparent.gif": transparent("P"),
    "L-transparent.png": transparent("L"),
    "RGB-transparent.png": transparent("RGB"),
    "LA.png": (Image.fromarray(noise(45, 70, 2), "LA"), {}),
    "RGBA.png": (Image.fromarray(noise(45, 70, 4), "RGBA"), {}),
    "RGBA.webp": (Image.fromarray(noise(45, 70, 4), "RGBA"), {"lossless": True}),
}


@pytest.mark.oracle
@pytest.mark.parametrize("orientation", [1, SIDEWAYS])
@pytest.mark.parametrize("name", MODES)
def test_pixels_of_every_kind_of_picture_are_those_of_transformers(name, orientation, tmp_path):
    """Its processors put transparency on white; `load_image` turns, and drops transparency."""
    picture, options = MODES[name]
    if not name.endswith(("gif", "ppm", "bmp")):
        exif = Image.Exif()
        exif[0x112] = orientation
        options = {**options, "exif": exif}
    picture.save(tmp_path / name, **options)
    load_image = pytest.importorskip("transformers").image_utils.load_image
    for images in (SQUASH, CROP, LONGEST):
        got = load(tmp_path / name, images, WHERE)
        with Image.open(tmp_path / name) as opened:
            upright = ImageOps.exif_transpose(opened)
        np.testing.assert_array_equal(got, pixels_of_transformers(images, upright))
        if not upright.has_transparency_data:
            loaded = load_image(str(tmp_path / name))
            np.testing.assert_array_equal(got, pixels_of_transformers(images, loaded))


@pytest.mark.oracle
@pytest.mark.parametrize("width_and_height", [(1, 1), (1, 90), (90, 1), (7, 90), (91, 90)])
@each_format
def test_narrow_and_small_pictures_are_those_of_transformers(images, width_and_height):
    picture = Image.fromarray(noise(*width_and_height[::-1]))
    wanted = pixels_of_transformers(images, picture)
    np.testing.assert_array_equal(images.pixels(picture), wanted)


@pytest.mark.oracle
@pytest.mark.parametrize("longest_edge", [1, 133, 1365, 2048, 4095, 4096])
def test_the_first_size_of_longest_is_that_of_transformers(longest_edge):
    """Here in one step; there in two, of which the second one is for edges above 4,096."""
    smolvlm = pytest.importorskip("transformers.models.smolvlm.image_processing_pil_smolvlm")
    images = ImageFormat(resize="longest", longest_edge=longest_edge)
    for height, width in np.random.default_rng(0).integers(1, 3000, (500, 2)).tolist():
        picture = np.broadcast_to(np.uint8(0), (3, height, width))
        wanted = smolvlm.get_resize_output_image_size(picture, longest_edge)
        assert images.sizes(width, height)[0] == wanted[::-1]


@pytest.mark.oracle
@pytest.mark.parametrize("name", [name for name in PROCESSORS if "Extractor" not in name])
def test_a_missing_setting_has_the_default_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    from_code = json.loads(getattr(transformers, f"{name}Pil")().to_json_string())
    default = ImageFormat.from_json({"image_processor_type": name})
    assert ImageFormat.from_json(from_code | {"image_processor_type": f"{name}Fast"}) == default


# --- Pixels ------------------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_every_picture_becomes_a_square_of_bytes(images, mode):
    pixels = images.pixels(Image.fromarray(noise(45, 70)).convert(mode))
    assert pixels.shape == (images.size, images.size, 3)
    assert pixels.dtype == np.uint8


def test_crop_takes_the_middle_and_the_others_all():
    stripes = np.repeat(np.eye(3, dtype=np.uint8) * 255, 100, axis=0)  # red, green, blue
    picture = Image.fromarray(np.broadcast_to(stripes, (100, 300, 3)).copy())
    crop = ImageFormat(size=90, resize="crop").pixels(picture)
    assert (crop[:, 5:-5] == [0, 255, 0]).all()
    for images in (SQUASH, LONGEST):
        colors = images.pixels(picture)[0, [0, images.size // 2, -1]]
        np.testing.assert_array_equal(colors, np.eye(3) * 255)


def test_longest_makes_the_shorter_side_even():
    images = ImageFormat(size=512, resize="longest", longest_edge=2048)
    assert images.sizes(1000, 500) == [(2048, 1024), (512, 512)]
    assert images.sizes(300, 1000) == [(614, 2048), (512, 512)]
    assert images.sizes(2048, 613) == [(2048, 614), (512, 512)]
    assert images.sizes(1, 10_000) == [(1, 2048), (512, 512)]


def test_what_is_transparent_is_white():
    clear = Image.new("RGBA", (9, 9), (255, 0, 0, 0))
    assert (SQUASH.pixels(clear) == 255).all()


def test_a_picture_on_its_side_is_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x112] = SIDEWAYS
    path = write_noise(tmp_path / "a.png", exif=exif)
    upright = Image.fromarray(np.rot90(noise(45, 70), -1))
    np.testing.assert_array_equal(load(path, SQUASH, WHERE), SQUASH.pixels(upright))


def test_an_animation_is_its_first_frame(tmp_path):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    for name in ("a.gif", "a.png", "a.webp", "a.tif"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], lossless=True)
        assert (load(tmp_path / name, SQUASH, WHERE) == [255, 0, 0]).all()


# --- Files -------------------------------------------------------------------------------------


def test_a_header_is_read_without_the_picture(tmp_path):
    path = write_noise(tmp_path / "a.png")
    content = path.read_bytes()
    path.write_bytes(content[:200])
    found = read_header("a.png", SQUASH, root=tmp_path, where=WHERE)
    assert found == path.resolve()
    with pytest.raises(UserError, match=rf"^{WHERE}: .*a\.png is damaged: .* copy it again"):
        load(found, SQUASH, WHERE)


@pytest.mark.parametrize("name", ["a.jpg", "a.gif", "a.webp", "a.bmp", "a.tif", "a.ppm"])
def test_a_truncated_picture_is_an_error(name, tmp_path):
    path = write_noise(tmp_path / name)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(UserError, match=rf"^{WHERE}: .*{name} is damaged: .* copy it again"):
        load(path, SQUASH, WHERE)


def test_the_content_decides_the_format(tmp_path):
    path = write_noise(tmp_path / "a.jpg", format="PNG")
    assert read_header("a.jpg", SQUASH, root=tmp_path, where=WHERE) == path.resolve()


def test_a_link_inside_the_root_is_followed(tmp_path):
    path = write_noise(tmp_path / "a.png")
    (tmp_path / "link.png").symlink_to(path)
    assert read_header("link.png", SQUASH, root=tmp_path, where=WHERE) == path.resolve()


def eps():
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "EPS")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty.*again"),
        (b"<!DOCTYPE html><html>", "is no image in the formats JPEG.*<!DOCTYPE html.*Convert"),
        (eps(), "is no image in the formats JPEG.*PS-Adobe.*Convert"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "is damaged.*again"),
        (b"\xff\xd8\xff", "is damaged.*again"),
    ],
    ids=["empty", "HTML", "EPS", "PNG", "JPEG"],
)
def test_a_file_that_is_no_image_is_an_error(content, message, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(content)
    for read in (
        lambda: read_header("a.png", SQUASH, root=tmp_path, where=WHERE),
        lambda: load(path, SQUASH, WHERE),
    ):
        with pytest.raises(UserError, match=rf"(?s)^{WHERE}: .*a\.png {message}"):
            read()


def png_of(width, height):
    """The beginning of a PNG of this size."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    return start + struct.pack(">I", zlib.crc32(chunk)) + struct.pack(">I", 1000) + b"IDAT"


def gif_of(width, height):
    """The beginning of a GIF with a frame of this size, which is larger than its screen."""
    screen, frame = struct.pack("<HH3x", 1, 1), struct.pack("<HHHHB", 0, 0, width, height, 0)
    return b"GIF89a" + screen + b"," + frame + b"\x08"


@pytest.mark.parametrize(
    "content", [png_of(9460, 9459), png_of(60_000, 60_000), gif_of(60_000, 60_000)]
)
def test_a_decompression_bomb_is_an_error_and_no_warning(content, tmp_path):
    """Pillow warns of the first and raises an error of its own for the others."""
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UserError, match=rf"^{WHERE}: .*a is too large: .* at most 89,478,485"):
        read_header("a", SQUASH, root=tmp_path, where=WHERE)


def test_a_picture_at_the_limit_is_no_bomb(tmp_path):
    (tmp_path / "a").write_bytes(png_of(9459, 9459))
    assert MAX_PIXELS - 9459 < 9459**2 < MAX_PIXELS == Image.MAX_IMAGE_PIXELS
    assert read_header("a", SQUASH, root=tmp_path, where=WHERE).name == "a"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("b.png", "There is no image .*b.png. Paths of images are relative to"),
        ("a.png/b.png", "There is no image"),
        ("", "is a folder"),
        ("pipe", "is a pipe or a device"),
        ("../out.png", "lies outside"),
        ("/etc/hostname", "lies outside"),
        ("../missing.png", "lies outside"),
        ("to_out.png", "lies outside .*out.png. Copy it"),
        ("to_missing", "There is no image"),
        ("circle", "circle"),
        ("data:image/png;base64,iVBORw0KGgo", "is no path"),
        ("https://example.com/a.png", "is no path. Save"),
        ("a\0.png", "is no path"),
        ("x" * 5000, "cannot be the path of an image: .*too long"),
    ],
)
def test_a_path_that_names_no_image_in_the_root_is_an_error(path, message, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    write_noise(root / "a.png")
    write_noise(tmp_path / "out.png")
    (root / "to_out.png").symlink_to("../out.png")
    (root / "to_missing").symlink_to("missing")
    (root / "circle").symlink_to("circle")
    os.mkfifo(root / "pipe")
    with pytest.raises(UserError, match=rf"^{WHERE}: .*{message}"):
        read_header(path, SQUASH, root=root, where=WHERE)


def test_a_picture_too_narrow_to_crop_is_an_error(tmp_path):
    Image.new("L", (10, 10_000)).save(tmp_path / "a.png")
    for read in (
        lambda: read_header("a.png", CROP, root=tmp_path, where=WHERE),
        lambda: load(tmp_path / "a.png", CROP, WHERE),
    ):
        with pytest.raises(UserError, match=rf"^{WHERE}: .*a.png: .*10 x 10000 .* 336 x 336000"):
            read()
    assert load(tmp_path / "a.png", SQUASH, WHERE).shape == (224, 224, 3)


def test_without_pillow_the_error_says_how_to_install_it(tmp_path, monkeypatch):
    write_noise(tmp_path / "a.png")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"need Pillow: pip install 'coat_jax\[vision\]'"):
        read_header("a.png", SQUASH, root=tmp_path, where=WHERE)


# --- Settings ----------------------------------------------------------------------------------


@each_format
def test_a_format_survives_its_json(images):
    assert ImageFormat.from_json(images.to_json()) == images


HALF = [0.5, 0.5, 0.5]
LLAVA = {
    "_valid_processor_keys": ["images", "do_resize"],
    "crop_size": {"height": 336, "width": 336},
    "do_center_crop": True,
    "image_mean": list(CLIP_MEAN),
    "image_processor_type": "CLIPImageProcessor",
    "image_std": list(CLIP_STD),
    "processor_class": "LlavaProcessor",
    "resample": 3,
    "rescale_factor": 1 / 255,
    "size": {"shortest_edge": 336, "longest_edge": None},
}
OLD_CLIP = {
    "crop_size": 336,
    "do_center_crop": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": list(CLIP_MEAN),
    "image_std": list(CLIP_STD),
    "resample": 3,
    "size": 336,
}
SIGLIP = {
    "do_convert_rgb": None,
    "image_mean": HALF,
    "image_processor_type": "SiglipImageProcessorFast",
    "image_std": HALF,
    "resample": 2,
    "rescale_factor": 0.003921568859368563,
    "size": {"height": 384, "width": 384},
}
SMOLVLM = {
    "do_image_splitting": True,
    "do_pad": True,
    "image_processor_type": "SmolVLMImageProcessor",
    "max_image_size": {"longest_edge": 512},
    "resample": 1,
    "size": {"longest_edge": 2048},
    "video_sampling": {"fps": 1},
}


@pytest.mark.parametrize(
    ("data", "images"),
    [
        (LLAVA, CROP),
        (OLD_CLIP, CROP),
        (SIGLIP, ImageFormat(size=384, resample="bilinear")),
        (SMOLVLM, LONGEST),
        (SMOLVLM | {"image_processor_type": "Idefics3ImageProcessorPil"}, LONGEST),
    ],
)
def test_files_of_transformers_are_read(data, images):
    assert ImageFormat.from_json(data) == images


@pytest.mark.parametrize(
    ("data", "changes", "message"),
    [
        (LLAVA, {"do_resize": False}, "do_resize=False.*only be True"),
        (LLAVA, {"do_center_crop": False}, "do_center_crop=False.*only be True"),
        (LLAVA, {"do_convert_rgb": False}, "do_convert_rgb=False.*only be True"),
        (LLAVA, {"do_rescale": False}, "do_rescale=False.*only be True"),
        (LLAVA, {"rescale_factor": 1 / 127.5}, "rescale_factor=0.0078.*only be 0.0039"),
        (LLAVA, {"do_normalize": False}, "do_normalize=False.*only be True"),
        (LLAVA, {"do_pad": True}, "do_pad=True.*only be False"),
        (LLAVA, {"crop_size": 224}, "crop_size=224.*only be .*336"),
        (LLAVA, {"crop_size": None}, "crop_size=.*224.*only be .*336"),
        (LLAVA, {"size": {"height": 336, "width": 336}}, "size=.*'height'.*be {'shortest_edge'"),
        (LLAVA, {"size": {}}, r"size=None must be a whole number from 1 to 4,096"),
        (LLAVA, {"resample": 0}, "resample=0 must be 'bicubic' or 'lanczos' or 'bilinear'"),
        (LLAVA, {"resample": [3]}, r"resample=\[3\] must be"),
        (LLAVA, {"image_mean": 0.5}, "mean=0.5 must be a tuple of 3, each a number"),
        (LLAVA, {"image_std": [1, 0, 1]}, "std=.* must be a tuple of 3, each a number above 0"),
        (SIGLIP, {"size": {"height": 384, "width": 256}}, "size=.*only be .*'width': 384"),
        (SIGLIP, {"size": 384}, "size=384.*only be {'height': 384"),
        (SIGLIP, {"do_center_crop": True}, "do_center_crop=True.*only be False"),
        (SMOLVLM, {"size": {"height": 9, "width": 9}}, "size=.*only be {'longest_edge'"),
        (SMOLVLM, {"size": {"longest_edge": 5000}}, "longest_edge=5000 must be.*4,096"),
        (SMOLVLM, {"max_image_size": 512}, "max_image_size=512.*only be {'longest_edge': 512}"),
        (SMOLVLM, {"image_processor_type": "LlavaImageProcessor"}, "'LlavaImage.*There are CLIP"),
        (SMOLVLM, {"image_processor_type": None}, "image processor None. There are CLIP"),
    ],
)
def test_settings_that_would_give_other_pixels_are_refused(data, changes, message):
    with pytest.raises(UserError, match=rf"^preprocessor_config.json.*{message}"):
        ImageFormat.from_json(data | changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "images.size=0 must be a whole number from 1 to 4,096. The default is 224"),
        ({"resize": "pad"}, "images.resize='pad' must be 'squash' or 'crop' or 'longest'"),
        ({"resize": "longest"}, "images.longest_edge=None with images.resize='longest'"),
        ({"longest_edge": 9}, "images.longest_edge=9 with images.resize='squash'"),
        ({"mean": (0.5, 0.5)}, r"images.mean=\(0.5, 0.5\) must be a tuple of 3, each a number"),
        ({"std": (1, 1, 0)}, "images.std=.* must be a tuple of 3, each a number above 0"),
    ],
)
def test_a_format_that_makes_no_sense_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        ImageFormat(**settings)
