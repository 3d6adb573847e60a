"""What an example asserts of its two runs, without and with coat_jax.

moments     with coat_jax every large parameter that trains has two 8-bit arrays of its shape in
            the optimizer's state, and no wider one; they are not constant, as without a gradient
products    the compiled step has FP8 arrays, if the example's layers were converted
loss        both have fallen, and differ by at most 1 % after the last step
saved       with named arrays in FP8 the first loss is the same to the last bit, and the step needs
            less memory
"""

import collections
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # examples are small: a GPU has to be asked for

import jax
import numpy as np

STEPS, BATCH, LENGTH, VOCAB = 20, 8, 32, 256
TOLERANCE = 0.01
LARGE = 16384  # elements: `coat.Storage.min_size`


class Run(NamedTuple):
    """What a training run leaves behind.

    Attributes:
        losses: of all steps.
        params: the trained parameters.
        state: the optimizer's state.
        program: the training step's text, as JAX traced, lowered or compiled it.
        temporary: bytes that the step needs besides its arguments, by XLA's account.
    """

    losses: list[float]
    params: Any
    state: Any
    program: str = ""
    temporary: int = 0


def batches(steps: int = STEPS, batch: int = BATCH, length: int = LENGTH) -> Iterator[np.ndarray]:
    """Tokens [batch, length] that can be learnt: most follow from the one before."""
    rng = np.random.default_rng(0)
    successor = rng.permutation(VOCAB)
    for _ in range(steps):
        tokens = rng.integers(0, VOCAB, (batch, length), dtype=np.int32)
        for i in range(1, length):
            follows = rng.random(batch) < 0.75
            tokens[:, i] = np.where(follows, successor[tokens[:, i - 1]], tokens[:, i])
        yield tokens


def mesh(*axes: str) -> jax.sharding.Mesh:
    """All devices along the first of these axes, with automatic sharding."""
    sizes = (jax.device_count(), *[1] * (len(axes) - 1))
    return jax.make_mesh(sizes, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def sharded(data: Iterable[np.ndarray] | None, mesh: jax.sharding.Mesh) -> Iterator[jax.Array]:
    """Batches, by default those of `batches`, sharded over the mesh's first axis."""
    over_batch = jax.NamedSharding(mesh, jax.P(mesh.axis_names[0]))
    for tokens in batches() if data is None else data:
        yield jax.device_put(tokens, over_batch)


def compare(train: Callable[[bool], Run], *, fp8_products: bool) -> None:
    """Trains without coat_jax and with it, asserts what they must have in common, and prints it."""
    theirs, ours = train(False), train(True)
    require_8_bit_moments(ours)
    require_same_loss(theirs, ours)
    if fp8_products:
        require_fp8(ours, "f8e4m3fn", "f8e5m2")
    print(f"{jax.device_count()} device(s)      loss   optimizer state")
    for name, run in (("without coat_jax", theirs), ("with coat_jax", ours)):
        print(f"{name:16} {run.losses[-1]:7.4f} {bytes_of(run.state) / 1e6:10.2f} MB")


def train(
    step: Any, params: Any, state: Any, data: Iterable[np.ndarray] | None, mesh: jax.sharding.Mesh
) -> Run:
    """Takes a jitted step for each batch, and asks XLA what the step needs."""
    losses, program = [], None
    for tokens in sharded(data, mesh):
        program = program or step.lower(params, state, tokens).compile()
        params, state, loss = step(params, state, tokens)
        losses.append(float(loss))
    assert program is not None
    temporary = program.memory_analysis().temp_size_in_bytes
    return Run(losses, params, state, program.as_text(), temporary)


def compare_saved(train: Callable[[bool, Iterable[np.ndarray]], Run]) -> None:
    """Trains with named arrays saved in their own dtype, and in FP8, and compares the two."""
    theirs, ours = (train(fp8, batches(length=4 * LENGTH)) for fp8 in (False, True))
    require_same_loss(theirs, ours)
    assert ours.losses[0] == theirs.losses[0], f"{ours.losses[0]} is not {theirs.losses[0]}."
    require_fp8(ours, "f8e4m3fn")
    assert ours.temporary < 0.8 * theirs.temporary, f"{ours.temporary} of {theirs.temporary} bytes."
    print(f"{jax.device_count()} device(s)      loss   memory of a step")
    for name, run in (("without coat_jax", theirs), ("with coat_jax", ours)):
        print(f"{name:16} {run.losses[-1]:7.4f} {run.temporary / 1e6:10.2f} MB")


def require_8_bit_moments(run: Run) -> None:
    """Raises unless all large parameters have two 8-bit moments, used, and none that is wider."""
    expected = collections.Counter(
        {shape: 2 * n for shape, n in _shapes(run.params, {4, 2}).items()}
    )
    found, wide = _shapes(run.state, {1}), _shapes(run.state, {2, 4})
    assert expected, "No parameter is large enough to have its moments in 8 bits."
    assert found == expected, f"8-bit moments of shapes {dict(found)}, expected {dict(expected)}."
    assert not wide.keys() & expected.keys(), f"Moments of more than 8 bits: {dict(wide)}."
    constant = {leaf.shape for leaf in _large(run.state, {1}) if len(np.unique(leaf)) == 1}
    assert not constant, f"Parameters of shapes {constant} had no gradient."


def require_fp8(run: Run, *dtypes: str) -> None:
    """Raises unless the training step has arrays of these dtypes."""
    program = run.program.lower().replace("_", "")
    missing = [name for name in dtypes if name not in program]
    assert not missing, f"The training step has no array of dtype {missing}."


def require_same_loss(theirs: Run, ours: Run) -> None:
    """Raises unless both runs learn, and end with losses that differ by at most 1 %."""
    first, last = theirs.losses[0], theirs.losses[-1]
    assert len(ours.losses) == len(theirs.losses)
    assert last < 0.95 * first, f"The loss hardly fell: from {first} to {last}."
    gap = abs(ours.losses[-1] / last - 1)
    assert gap <= TOLERANCE, f"The loss is {ours.losses[-1]} instead of {last}: {gap:.1%} off."


def bytes_of(tree: Any) -> int:
    """The bytes of all arrays in a tree, on all devices together."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))


def _shapes(tree: Any, sizes: set[int]) -> collections.Counter:
    """The shapes of large arrays in a tree whose elements have one of these sizes in bytes."""
    return collections.Counter(leaf.shape for leaf in _large(tree, sizes))


def _large(tree: Any, sizes: set[int]) -> list[jax.Array]:
    """Large arrays in a tree whose elements have one of these sizes in bytes."""
    return [
        leaf
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and leaf.size >= LARGE and leaf.dtype.itemsize in sizes
    ]
