"""Qwix: a provider whose products are those of coat_jax.

    python -m examples.qwix_provider

Qwix intercepts `lax.dot_general` in a model, and its rules say in which modules products are
replaced. Here `coat.ops.DotGeneral` replaces them: E4M3 forward and E5M2 backward, with one FP8
input saved for the backward pass. The model, from `examples.flax_nnx`, stays as it is.
"""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import optax
import qwix
from flax import nnx

import coat_jax as coat
from examples import check
from examples.flax_nnx import Model, step


class FP8Provider(qwix.QuantizationProvider):
    """Products of an input with a weight in FP8, in the modules that a rule matches."""

    def dot_general(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: jax.lax.DotDimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Replaces `lax.dot_general`. A product with batch axes is attention, and has no weight."""
        rule, _ = self._get_current_rule_and_op_id("dot_general")
        has_batch_axes = any(dimension_numbers[1])
        fp8 = rule is not None and not has_batch_axes
        dot_general = coat.ops.DotGeneral(coat.COAT) if fp8 else jax.lax.dot_general
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
        )

    def get_intercept_map(self) -> dict[str, Any]:
        """The functions that Qwix intercepts."""
        return {**super().get_intercept_map(), "jax.lax.dot_general": self.dot_general}


def train(
    fp8: bool, data: Iterable[np.ndarray] | None = None, *, width: int = 128, layers: int = 1
) -> check.Run:
    """Trains on all devices; with `fp8`, with the provider and 8-bit moments."""
    mesh = check.mesh("fsdp")
    with jax.set_mesh(mesh):
        model = Model(width, layers, nnx.Rngs(0))
        tx = optax.adamw(3e-3)
        if fp8:
            provider = FP8Provider([qwix.QuantizationRule(module_path="layers/.*")])
            tokens = np.zeros((jax.device_count(), 2), np.int32)
            model = qwix.quantize_model(model, provider, tokens)
            assert not provider.get_unused_rules()
            tx = coat.optax.fp8_adamw(3e-3)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        losses = []
        for tokens in check.sharded(data, mesh):
            losses.append(float(step(model, optimizer, tokens)))
        program = step.lower(model, optimizer, tokens).as_text()
    return check.Run(losses, nnx.state(model, nnx.Param), nnx.state(optimizer), program)


if __name__ == "__main__":
    check.compare(train, fp8_products=True)
