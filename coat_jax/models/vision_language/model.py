"""A model that sees: the features of images take places in the text that the decoder reads.

    features = projector(tower(images))
    x = embed[tokens], but features in order where tokens are `image_token`
    logits = decoder(x)

Every row has room for the same number of images, so one program serves rows with any number of
them, or none: features that no token asks for are dropped.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, UInt8

from coat_jax import ops, probes
from coat_jax.models.llama import Llama, require_tokens, shard_batch
from coat_jax.models.protocol import Loss
from coat_jax.models.vision_language.config import Config
from coat_jax.models.vision_language.tower import Tower
from coat_jax.nn.parameters import value_of, vector, weight


class Batch(NamedTuple):
    """Rows of text and the images in them in order, or one of them."""

    tokens: Int[Any, "*B S"]
    labels: Int[Any, "*B S"]  # the token after each one; IGNORED where it does not count
    images: UInt8[Any, "*B I H W 3"]
    positions: Int[Any, "*B S"] | None = None  # of each token in its document
    segments: Int[Any, "*B S"] | None = None  # documents, numbered from 1; 0 is padding


class VisionLanguage(nnx.Module):
    """Images and tokens to hidden states, logits or a loss.

    Attributes:
        tower: see `Tower`.
        projector: from the tower's width to the decoder's.
        decoder: a `coat.models.Llama`.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        self.tower = Tower(config.tower, rngs=rngs)
        self.projector = (LinearProjector if config.projector == "linear" else MLPProjector)(
            config, rngs=rngs
        )
        self.decoder = Llama(config.decoder, rngs=rngs)

    def __call__(self, batch: Batch) -> Float[Array, "B S V"]:
        """The logits of the token after each one, in FP32; labels are not read."""
        return self.decoder.logits(self.hidden(batch))

    def hidden(self, batch: Batch) -> Float[Array, "B S D"]:
        """The input of the head."""
        require_tokens(self.config.decoder, batch.tokens, batch.positions, batch.segments)
        x = self.embed_tokens(batch.tokens, batch.images)
        with probes.named("decoder"):
            return self.decoder.hidden_of(x, batch.positions, batch.segments)

    def embed_tokens(
        self, tokens: Int[Array, "B S"], images: UInt8[Array, "B I H W 3"]
    ) -> Float[Array, "B S D"]:
        """The residual stream before the decoder's first layer."""
        x, features = self.decoder.embed_tokens(tokens), self.features(images)
        length, count = tokens.shape[1], features.shape[1]

        def put(x: Array, tokens: Array, features: Array) -> Array:
            asked = tokens == self.config.image_token
            (places,) = jnp.nonzero(asked, size=count, fill_value=length)
            # No place occurs twice, not even among those beyond the row, which are dropped. So the
            # gradient of the features is a gather: it adds nothing, in no order.
            places = jnp.where(places < length, places, length + jnp.arange(count))
            return x.at[places].set(features, mode="drop", unique_indices=True)

        # Without this XLA may exchange rows on a mesh, by a wrong order of its devices.
        return shard_batch(jax.vmap(put)(x, tokens, features), self.config.batch_axes)

    def features(self, images: UInt8[Array, "B I H W 3"]) -> Float[Array, "B IT D"]:
        """What the decoder sees of the images of each row."""
        rows, count, *shape = images.shape
        found = self.projector(self.tower(images.reshape(rows * count, *shape)))
        return found.reshape(rows, count * found.shape[1], -1)

    def loss(self, batch: Batch, *, evaluate: bool = False) -> Loss:
        """The cross-entropy of the labelled tokens."""
        return self.decoder.loss_of(self.hidden(batch), batch.labels, evaluate=evaluate)


class LinearProjector(nnx.Module):
    """Squares of features, one linear layer. SmolVLM's connector.

    Attributes:
        kernel: [shuffle^2 Dv, D]
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        inputs, outputs = config.tower.width * config.shuffle**2, config.decoder.width
        self.shuffle, self.precision = config.shuffle, config.precision
        axes, dtype = config.axes.widening, config.param_dtype
        self.kernel = weight(rngs, (inputs, outputs), axes, dtype=dtype)

    def __call__(self, features: Float[Array, "N T Dv"]) -> Float[Array, "N U D"]:
        """One vector for each square of features."""
        with probes.named("projector"):
            x = shuffled(features, self.shuffle)
            return ops.linear(x, value_of(self.kernel), precision=self.precision)


class MLPProjector(nnx.Module):
    """Two layers with a gelu between them. LLaVA's projector.

    Attributes:
        up, down: [Dv, D] and [D, D].
        up_bias, down_bias: [D], or None.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        inputs, outputs, dtype = config.tower.width, config.decoder.width, config.param_dtype
        self.precision = config.precision
        self.up = weight(rngs, (inputs, outputs), config.axes.widening, dtype=dtype)
        shape = outputs, outputs
        self.down = weight(rngs, shape, config.axes.narrowing(shape), dtype=dtype)
        biases = [
            vector(outputs, sharding, fill=0.0, dtype=dtype) if config.projector_bias else None
            for sharding in ((config.axes.tensor,), ())
        ]
        self.up_bias, self.down_bias = map(nnx.data, biases)

    def __call__(self, features: Float[Array, "N T Dv"]) -> Float[Array, "N T D"]:
        """One vector for each feature."""
        with probes.named("projector"):
            return ops.mlp(
                features,
                None,
                *map(value_of, (self.up, self.down, self.up_bias, self.down_bias)),
                activation="gelu",
                residual=False,
                precision=self.precision,
            )


def shuffled(features: Float[Array, "N T D"], side: int) -> Float[Array, "N U D'"]:
    """Squares of `side` x `side` neighbouring features, each as one vector."""
    n, count, width = features.shape
    across = round(count**0.5)
    x = features.reshape(n, across // side, side, across // side, side, width)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(n, count // side**2, side * side * width)
