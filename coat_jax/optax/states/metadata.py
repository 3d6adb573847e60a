"""Sharding annotations on the state of an optimizer.

Flax's modules can carry the names of mesh axes beside their arrays: `nnx.Variable` as metadata,
`nn.Partitioned` and `nn.LogicallyPartitioned` as boxes. A state made from such parameters
inherits the annotations, and trainers (`nnx.Optimizer`, MaxText) shard the state by them. Codes
have their parameter's shape, so its annotation fits. Scales have one number per group of the
last axis: for a width of 128 only one, which cannot be sharded. `fit_metadata` removes the axes
that do not fit from the annotations of scales.
"""

import sys
from typing import Any

import jax

from coat_jax.numerics import mesh_axes

# Metadata of an nnx.Variable. `sharding_names` is an earlier name of `out_sharding`. MaxText's
# stacked layers have both, and where Flax copies annotations to a state, the earlier one would win.
ANNOTATIONS = ("out_sharding", "optimizer_sharding", "sharding_names")


def fit_metadata(tree: Any, params: Any) -> Any:
    """Returns `tree`, a state leaf for each parameter, with annotations that fit its shapes.

    An axis as long as its parameter's keeps its name. Any other axis loses its name in a box, whose
    names the user maps to mesh axes later. In an nnx.Variable it keeps a name that the mesh of
    `jax.set_mesh` has if the mesh axis divides it. A name that the mesh does not have is mapped to
    mesh axes later (MaxText), or the mesh is not set yet: the axis then keeps it if the number of
    all devices divides the axis, because then any mesh does.
    """

    def fit(box: Any, param: Any) -> Any:
        if not _is_box(box) or len(jax.tree.leaves(box)) != 1:
            return box
        size, param_size = (tuple(jax.tree.leaves(tree)[0].shape) for tree in (box, param))
        same_rank = len(size) == len(param_size)
        equal = [same_rank and n == m for n, m in zip(size, param_size, strict=False)]
        if not isinstance(box, _flax_types("flax.nnx", "Variable")):
            return box.replace(names=_restricted(box.names, equal))
        metadata = box.get_metadata()
        fitted = {}
        for name in ANNOTATIONS:
            axes = metadata.get(name)
            if isinstance(axes, tuple | jax.sharding.PartitionSpec):
                fits = [_may_divide(axis, n) for axis, n in zip(axes, size, strict=False)]
                keep = [a or b for a, b in zip(equal, fits, strict=False)]
                fitted[name] = _restricted(axes, keep)
        return box.copy(**fitted) if fitted else box

    return jax.tree.map(fit, tree, params, is_leaf=_is_box)


def _is_box(node: Any) -> bool:
    boxes = _flax_types("flax.nnx", "Variable") + _flax_types("flax.core.meta", "Partitioned")
    return isinstance(node, boxes)


def _flax_types(module: str, name: str) -> tuple[Any, ...]:
    """A tuple with a class of Flax; empty until the user imports Flax, which takes a second."""
    return (getattr(sys.modules[module], name),) if module in sys.modules else ()


def _restricted(axes: Any, keep: list[bool]) -> Any:
    """The names of axes, None where `keep` is false, in a container like theirs."""
    names = [axis if stays else None for axis, stays in zip(axes, keep, strict=False)]
    return tuple(names) if isinstance(axes, tuple) else type(axes)(*names)


def _may_divide(axis: Any, size: int) -> bool:
    """Whether these axes can be sharded: on the mesh that is set, or on any mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    known = all(name in mesh.shape for name in mesh_axes.names(axis))
    return size % (mesh_axes.shards(axis, mesh) if known else jax.device_count()) == 0
