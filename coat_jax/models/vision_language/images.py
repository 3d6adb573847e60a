"""Pictures in files, as the pixels that a vision tower sees.

    file -> upright (EXIF) -> RGB, on white where transparent -> resized -> uint8[size, size, 3]

    resize       as in      a picture becomes
    "squash"     SigLIP     size x size
    "crop"       CLIP       the shorter side size, then the middle of it
    "longest"    SmolVLM    the longer side longest_edge, the shorter one even, then size x size

The pixels equal those of transformers' processors for Pillow; its processors for torchvision round
differently. Pictures are never split into tiles. `mean` and `std` are applied on the device. As in
transformers, 16-bit gray is clipped to 255, not scaled.
"""

import contextlib
import dataclasses
import errno
import importlib
import io
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from jaxtyping import UInt8

from coat_jax.errors import UserError
from coat_jax.files import MissingFile, read_bytes, require_regular
from coat_jax.validation import Between, brief, require_fields

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF", "PPM")  # no EPS, which runs Ghostscript
MAX_PIXELS = 89_478_485  # Pillow's limit, against small files that decode to gigabytes
DAMAGE = (  # what Pillow raises for one or another damaged file
    OSError, SyntaxError, ValueError, TypeError, ArithmeticError, LookupError, EOFError,
    struct.error, zlib.error,
)  # fmt: skip
REMEDY = "Download or copy it again, or remove what refers to it."

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
RESAMPLE = {"lanczos": 1, "bilinear": 2, "bicubic": 3}  # Pillow's numbers
FILE = "preprocessor_config.json"

Edge = Annotated[int, Between(least=1, most=4096)]  # Idefics3 makes no edge longer
Positive = Annotated[float, Between(above=0)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """How pictures are resized and normalized. The defaults are SigLIP's.

    Attributes:
        size: the pixels on each side of what the tower sees.
        resize: how a picture becomes a square.
        longest_edge: the longer side after the first step of "longest"; None for the others.
        resample: the filter of each step.
        mean: of red, green and blue, which are from 0 to 1; subtracted first.
        std: of red, green and blue; divided by then.
    """

    size: Edge = 224
    resize: Literal["squash", "crop", "longest"] = "squash"
    longest_edge: Edge | None = None
    resample: Literal["bicubic", "lanczos", "bilinear"] = "bicubic"
    mean: tuple[float, float, float] = HALF
    std: tuple[Positive, Positive, Positive] = HALF

    def __post_init__(self) -> None:
        require_fields(self, "images.")
        if (self.longest_edge is None) == (self.resize == "longest"):
            raise UserError(
                f"images.longest_edge={self.longest_edge} with images.resize={self.resize!r}: "
                "'longest' needs one, such as 2048, and the others have None."
            )

    def pixels(self, image: "Image.Image") -> UInt8[np.ndarray, "size size 3"]:
        """Returns a picture as the tower sees it; of an animation, the current frame."""
        image = _to_rgb(pillow("ImageOps").exif_transpose(image))
        for width_and_height in self.sizes(*image.size):
            image = image.resize(width_and_height, RESAMPLE[self.resample])
        left, top = ((side - self.size) // 2 for side in image.size)
        return np.array(image.crop((left, top, left + self.size, top + self.size)))

    def sizes(self, width: int, height: int) -> list[tuple[int, int]]:
        """Returns the widths and heights to which a picture is resized, one after the other.

        The roundings are those of transformers. Raises for a picture that is so narrow that "crop"
        would make its longer side huge.
        """
        square = (self.size, self.size)
        if self.resize == "crop":
            longer = int(self.size * max(width, height) / min(width, height))
            if self.size * longer > MAX_PIXELS:
                raise UserError(
                    f"A picture of {width} x {height} pixels is too narrow for images.resize="
                    f"'crop', which would make it {self.size} x {longer}. Cut it to a better "
                    "shape, or remove what refers to it."
                )
            return [(longer, self.size) if width > height else (self.size, longer)]
        if self.longest_edge is None:
            return [square]
        aspect, longest = width / height, self.longest_edge
        shorter = int(longest / aspect if width >= height else longest * aspect)
        even = max(shorter + shorter % 2, 1)
        return [(longest, even) if width >= height else (even, longest), square]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "ImageFormat":
        """Returns the format that a preprocessor_config.json of transformers describes.

        Raises if transformers would compute other pixels; only do_image_splitting is ignored.
        """
        given = data.get("image_processor_type", data.get("feature_extractor_type"))
        name = str(given).removesuffix("Fast").removesuffix("Pil")
        if name not in PROCESSORS:
            raise UserError(
                f"{FILE} names the image processor {brief(given)}. There are "
                f"{', '.join(PROCESSORS)}."
            )
        default = PROCESSORS[name]
        data = default.to_json() | _without_nulls(data)  # null stands for the default
        longest = default.resize == "longest"
        resample, mean, std = (data[entry] for entry in ("resample", "image_mean", "image_std"))
        fields: dict[str, Any] = {
            "size": _side(data["max_image_size" if longest else "size"]),
            "longest_edge": _side(data["size"]) if longest else None,
            "resample": {str(number): name for name, number in RESAMPLE.items()}.get(
                str(resample), resample
            ),
            "mean": tuple(mean) if isinstance(mean, list) else mean,
            "std": tuple(std) if isinstance(std, list) else std,
        }
        try:
            images = dataclasses.replace(default, **fields)
        except UserError as error:
            raise UserError(f"{FILE}: {error}") from None
        allowed = {"rescale_factor": np.float32(1 / 255).item()}  # besides 1 / 255
        if images.resize == "crop":  # old files
            allowed |= {"size": images.size, "crop_size": images.size}
        for entry, value in images.to_json().items():
            same = data[entry] in (value, allowed.get(entry, value))
            if not same and entry not in ("image_processor_type", "do_image_splitting"):
                raise UserError(
                    f"{FILE} has {entry}={brief(data[entry])}, which coat_jax does not support: "
                    f"here it can only be {value}."
                )
        return images

    def to_json(self) -> dict[str, Any]:
        """Returns the preprocessor_config.json with which transformers computes these pixels."""
        square = {"height": self.size, "width": self.size}
        by_resize: dict[str, dict[str, Any]] = {
            "squash": {"size": square, "do_pad": False},
            "crop": {"size": {"shortest_edge": self.size}, "crop_size": square, "do_pad": False},
            "longest": {
                "size": {"longest_edge": self.longest_edge},
                "max_image_size": {"longest_edge": self.size},
                "do_image_splitting": False,
            },
        }
        names = [name for name, default in PROCESSORS.items() if default.resize == self.resize]
        return {
            "image_processor_type": names[0],
            "do_convert_rgb": True,
            "do_resize": True,
            "resample": RESAMPLE[self.resample],
            "do_center_crop": self.resize == "crop",
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            **by_resize[self.resize],
        }


CLIP = ImageFormat(resize="crop", mean=CLIP_MEAN, std=CLIP_STD)
IDEFICS3 = ImageFormat(size=364, resize="longest", longest_edge=4 * 364, resample="lanczos")
PROCESSORS = {  # and their defaults; of those that resize alike, the first is written
    "CLIPImageProcessor": CLIP,
    "CLIPFeatureExtractor": CLIP,
    "SiglipImageProcessor": ImageFormat(),
    "SmolVLMImageProcessor": IDEFICS3,
    "Idefics3ImageProcessor": IDEFICS3,
}


def _without_nulls(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_nulls(value) if isinstance(value, Mapping) else value
        for name, value in data.items()
        if value is not None
    }


def _side(size: Any) -> Any:
    """The first number of a size such as {"height": 224, "width": 224}."""
    return next(iter(size.values()), None) if isinstance(size, Mapping) else size


def _to_rgb(image: "Image.Image") -> "Image.Image":
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = pillow("Image").new("RGBA", image.size, "white")
        image = pillow("Image").alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def read_header(path: str | Path, format: ImageFormat, *, root: Path, where: str) -> Path:
    """Checks a picture by its header; returns its path, absolute and without links.

    Args:
        path: of the picture, relative to `root`.
        format: how it will be resized.
        root: the folder with all pictures; links may not lead out of it.
        where: the place that names the picture, such as "chat.jsonl:12"; errors begin with it.
    """
    with _errors_at(where):
        found = _find(path, root)
        with found.open("rb") as file, _open(file, found) as image, _damage(found):
            format.sizes(*image.size)  # raises if it is too narrow
        return found


def load(path: Path, format: ImageFormat, where: str) -> UInt8[np.ndarray, "S S 3"]:
    """Returns a picture as the tower sees it; of an animation, the first frame.

    Args:
        path: of the picture, as `read_header` returns it.
        format: how it is resized.
        where: the place that names the picture; errors begin with it.
    """
    with _errors_at(where):
        file = io.BytesIO(read_bytes(path, "image"))
        with _open(file, path) as image, _damage(path):
            return format.pixels(image)


def _find(path: str | Path, root: Path) -> Path:
    """The path without links, of a regular file in the folder `root`."""
    text = str(path)
    if "\0" in text or text.startswith(("data:", "http:", "https:")):
        raise UserError(f"{brief(text)} is no path. Save the image as a file in {root}.")
    try:
        found = (root / path).resolve()
        inside = found.is_relative_to(root.resolve())
        if inside:
            require_regular(found, "image")
    except MissingFile as error:
        raise UserError(f"{error} Paths of images are relative to {root}.") from None
    except (OSError, RuntimeError) as error:  # a name that is too long, links in a circle
        raise UserError(f"{brief(text)} cannot be the path of an image: {error}.") from None
    if not inside:
        raise UserError(
            f"{text} lies outside {root}, at {found}. Copy it into this folder, or name a folder "
            "that has all images."
        )
    return found


@contextlib.contextmanager
def _errors_at(where: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """Turns what Pillow raises for a damaged file into a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except pillow("Image").DecompressionBombError as error:
        raise _too_large(path, str(error)) from None
    except DAMAGE as error:
        # A damaged file may have Pillow seek to a negative position, which is EINVAL.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # of the disk
        raise UserError(f"{path} is damaged: {error}. {REMEDY}") from None


def _too_large(path: Path, found: str) -> UserError:
    return UserError(f"{path} is too large: {found}. Scale it to at most {MAX_PIXELS:,} pixels.")


def _open(file: IO[bytes], path: Path) -> "Image.Image":
    """Opens a picture without decoding it.

    Image.open would warn of large pictures, and catching warnings is not safe in threads.
    """
    start = file.read(16)
    if not start:
        raise UserError(f"{path} is empty. {REMEDY}")
    for name in FORMATS:
        plugin = name if name == "WebP" else name.capitalize()
        pillow(f"{plugin}ImagePlugin")  # registers the format
        opens, accepts = pillow("Image").OPEN[name.upper()]
        if accepts(start) is True:
            file.seek(0)
            with _damage(path):
                image: Image.Image = opens(file, "")
            if image.width * image.height > MAX_PIXELS:
                raise _too_large(path, f"{image.width} x {image.height} pixels")
            return image
    raise UserError(
        f"{path} is no image in the formats {', '.join(FORMATS)}: it begins with {start!r}. "
        "Convert it, or remove what refers to it."
    )


def pillow(module: str) -> Any:
    """Imports a module of Pillow, which is installed with the extra `vision`."""
    try:
        return importlib.import_module(f"PIL.{module}")
    except ImportError as error:
        raise ImportError("Images need Pillow: pip install 'coat_jax[vision]'.") from error
