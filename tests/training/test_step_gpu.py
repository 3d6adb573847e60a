"""The trainer's step on several real GPUs, against one of them.

    python -m pytest -m gpu tests/training/test_step_gpu.py

A model wide enough for every kernel, in BF16 as it is trained.
"""

import jax
import numpy as np
import pytest

pytest.importorskip("jax_triton")
from train_cases import ONE, random_batches, small, stepper

from coat_jax.models.config import Experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs GPUs"),
    pytest.mark.skipif(jax.device_count() < 2, reason="needs several GPUs"),
]

WIDE = {
    "vocab": 2048,
    "width": 512,
    "heads": 4,
    "kv_heads": 4,
    "head_dim": 128,
    "ffn": 1536,
    "context": 256,
    "param_dtype": "bfloat16",
}
FOUR = [(4, 1, 1), (1, 4, 1), (1, 1, 4), (1, 2, 2)]
TWO = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]


# A logit is off by some 2^-9 of its size, in every place another way, and a loss is the mean of
# 4096: the first agrees to far less. FP8 turns codes besides, and steps spread both.
@pytest.mark.parametrize("sizes", FOUR if jax.device_count() >= 4 else TWO, ids=str)
@pytest.mark.parametrize("precision", ["bf16", "coat", "coat_lean"])
def test_losses_do_not_depend_on_the_mesh(precision, sizes):
    state = compare({"precision": precision}, sizes)
    _, fsdp, tensor = sizes
    for leaf in jax.tree.leaves((state.params, state.moments)):
        if leaf.size >= 512 * 512:  # a matrix or its codes: nothing large is whole anywhere
            assert leaf.addressable_shards[0].data.size == leaf.size // (fsdp * tensor)


@pytest.mark.parametrize("sizes", [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)], ids=str)
def test_losses_of_experts_do_not_depend_on_the_mesh(sizes):
    compare({"precision": "coat", "ffn": 256, "experts": Experts(count=8, chosen=2)}, sizes)


def compare(model, sizes):
    """The state after some steps on a mesh, whose losses are those of one GPU."""
    optimizer = {"name": "adamw" if model["precision"] == "bf16" else "fp8_adamw"}
    config = small(WIDE | model, optimizer, sequence_length=256)
    batches = random_batches(8, config)
    _, alone = stepper(config, ONE).run(batches)
    state, spread = stepper(config, sizes).run(batches)
    losses, norms = (
        np.array([[getattr(r, name) for r in reports] for reports in (alone, spread)])
        for name in ("loss", "gradient_norm")
    )
    assert losses[0, -1] < 0.97 * losses[0, 0]  # something was learnt
    np.testing.assert_allclose(losses[1, 0], losses[0, 0], rtol=5e-4)
    np.testing.assert_allclose(losses[1], losses[0], rtol=5e-3)
    np.testing.assert_allclose(norms[1], norms[0], rtol=5e-2)
    return state
