"""How the linear layers of a model are quantized: their formats, and how inputs are rounded."""

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple

from coat_jax.errors import UserError
from coat_jax.numerics.eight_bits import EightBits
from coat_jax.numerics.quantizer import Fit
from coat_jax.ops.quantized import Activations, WeightFormat
from coat_jax.validation import Between, require_fields

CANDIDATES: tuple[EightBits, ...] = ("int8", "fp8")  # in a tie, the first one is taken


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of quantization.

    Embedding and head stay as they are, and so do norms and biases.

    Attributes:
        format: of weights and of rounded activations: "int8", "fp8" (E4M3), or "mixed": for each
            input and the weights that multiply it, the one of these with the higher
            signal-to-noise ratio; "int4" for weights in INT4 and rounded activations in FP8.
        fit: the range of a weight's channel: up to its largest magnitude ("max"), up to a
            "percentile" of its magnitudes, or the range with the least squared error ("mse"). INT4
            has ranges of groups, always with little squared error.
        activations: "none" rounds weights only; "static" rounds each layer's input with one
            scale, from calibration; "dynamic" with one for each token, from its largest element.
        activation_fit: as `fit`, for static activations.
        percentile: the percentile of magnitudes at which a range ends, for that fit.
        leave: globs of projections that stay as they are: "layers.0.*", "*.down".
    """

    format: Literal["int8", "fp8", "mixed", "int4"] = "int8"
    fit: Fit = "mse"
    activations: Activations = "dynamic"
    activation_fit: Fit = "mse"
    percentile: Annotated[float, Between(above=50, most=100)] = 99.9
    leave: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_fields(self)

    @property
    def needs_calibration(self) -> bool:
        """Whether the recipe needs calibration, to see the inputs of layers."""
        mixed = self.format == "mixed" and self.activations != "none"
        return self.activations == "static" or mixed

    def is_left(self, path: str) -> bool:
        """Whether the projection at this path stays as it is."""
        return any(fnmatch.fnmatchcase(path, glob) for glob in self.leave)

    def require_matches(self, paths: Iterable[str]) -> None:
        """Raises unless each of `leave` matches a path, and something is left to quantize."""
        known = list(paths)
        for glob in self.leave:
            if not fnmatch.filter(known, glob):
                raise UserError(
                    f"leave={glob!r} matches no projection. It is a glob of whole paths, as in "
                    f"{', '.join(known[:7])}."
                )
        if all(map(self.is_left, known)):
            raise UserError(f"leave={self.leave!r} matches every projection: nothing is quantized.")


class Scheme(NamedTuple):
    """The quantization of one projection.

    Attributes:
        format: of its codes.
        activations: how its inputs are rounded.
        zeros: whether INT4 codes have zeros, and scales of any size; see `coat.ops.Quantized`.
    """

    format: WeightFormat
    activations: Activations
    zeros: bool = False

    @property
    def input_format(self) -> EightBits:
        """The format of rounded inputs."""
        return "fp8" if self.format == "int4" else self.format
