"""The kernel of attention to the past against its reference, interpreted and on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax import ops
from coat_jax.kernels import attention_to_past as kernels
from coat_jax.numerics.cache_formats import StoredHeads, encode_heads

FORMATS = [None, "int8", "fp8", "int4"]


def draw(batch, slots, heads, group, width, format, dtype="float32", layers=2):
    """q, past and new, with keys that have a mean."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = [(layers, batch, heads, slots, width)] * 2 + [(batch, heads, 1, width)] * 2
    stored = [
        encode_heads((jax.random.normal(key, shape) + i % 2).astype(dtype), format)
        for i, (key, shape) in enumerate(zip(keys, shapes, strict=False))
    ]
    q = jax.random.normal(keys[4], (batch, 1, heads * group, width), dtype)
    return q, ops.Past(*stored[:2]), ops.Past(*stored[2:])


class AttentionToPastLaws:
    """A module derives from it, and chooses sizes.

    Attributes:
        slots: of the cache, no multiple of a block.
        cases: KV heads, query heads for each, and the width of a head.
        dtype: of q.
        bound: of errors. In FP32 sums have another order, and with codes in integers the kernel
            rounds one query head to 16 bits, and each of its sums to 2^-9 of a code. In BF16 the
            reference rounds what codes stand for and its probabilities, the kernel probabilities
            times scales: each by 2^-9, and both round the result.
    """

    slots = 150
    cases = (2, 3, 64), (1, 1, 128)
    dtype = "float32"
    bound = 2e-4

    def compare(self, drawn, first, filled, layer=1, **how):
        q, past, new = drawn
        visible = ops.Visible(past, layer, jnp.array(first), filled)
        with jax.default_matmul_precision("float32"):  # not TF32, on a GPU
            got, wanted = (
                ops.attention_to_past(q, new, visible, implementation=implementation, **how)
                for implementation in ("triton", "xla")
            )
        assert got.dtype == wanted.dtype == self.dtype
        got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
        assert np.linalg.norm(got - wanted) < self.bound * np.linalg.norm(wanted)

    @pytest.mark.parametrize("format", FORMATS)
    @pytest.mark.parametrize("number", [0, 1])
    def test_texts_begin_where_they_begin(self, format, number):
        """At the first slot, within a block, and at the beginning of the last one."""
        drawn = draw(3, self.slots, *self.cases[number], format, self.dtype)
        self.compare(drawn, [0, 70, 128], 141)

    @pytest.mark.parametrize("number", [0, 1])
    def test_many_texts_have_no_parts_and_other_blocks(self, number, monkeypatch):
        monkeypatch.setattr(kernels, "PROGRAMS", 1)
        drawn = draw(3, self.slots, *self.cases[number], "int8", self.dtype)
        self.compare(drawn, [0, 70, 128], 141)

    @pytest.mark.parametrize("format", ["int4", None])
    def test_all_slots_or_none_may_be_visible(self, format):
        drawn = draw(2, self.slots, *self.cases[0], format, self.dtype)
        self.compare(drawn, [0, self.slots], self.slots, scale=0.3)
        self.compare(drawn, [5, 4], 5, layer=0)
        self.compare(drawn, [0, 0], 0)

    def test_slots_that_are_not_visible_are_not_read(self):
        q, past, new = draw(2, self.slots, *self.cases[0], None, self.dtype)
        slots = jnp.arange(self.slots)
        seen = ((slots >= 10) & (slots < 100))[:, None]
        lost = [StoredHeads(jnp.where(seen, stored.codes, jnp.nan)) for stored in past]
        both = (
            ops.attention_to_past(
                q, new, ops.Visible(given, 0, jnp.array([10, 30]), 100), implementation="triton"
            )
            for given in (past, ops.Past(*lost))
        )
        np.testing.assert_array_equal(*both)
