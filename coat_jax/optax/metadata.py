"""Sharding annotations on the state of an optimizer.

Flax's modules can carry the names of mesh axes beside their arrays: `nnx.Variable` as metadata,
`nn.Partitioned` and `nn.LogicallyPartitioned` as boxes. A state made from such parameters
inherits the annotations, and trainers (`nnx.Optimizer`, MaxText) shard the state by them. Codes
have their parameter's shape, so its annotation fits. Scales have one number per group of the
last axis: a width of 128 has one, which no mesh axis divides. Here the annotation of scales
loses the axes that do not fit.
"""

import sys
from typing import Any

import jax

ANNOTATIONS = ("out_sharding", "optimizer_sharding")  # of an nnx.Variable


def fit_metadata(tree: Any, params: Any) -> Any:
    """Returns `tree`, a state leaf for each parameter, with annotations that fit its shapes.

    An axis as long as its parameter's keeps its name, and no other: annotations are a part of the
    tree's structure, which must not depend on the mesh that happens to be set. Trainers that use
    them hold such an axis whole on each device; `state_shardings` shards it where that fits.
    """

    def fit(box: Any, param: Any) -> Any:
        if not _is_box(box) or len(jax.tree.leaves(box)) != 1:
            return box
        shapes = [tuple(jax.tree.leaves(tree)[0].shape) for tree in (box, param)]
        if isinstance(box, _flax_types("flax.nnx", "Variable")):
            metadata = box.get_metadata()
            fitted = {
                name: _fitted(metadata[name], *shapes)
                for name in ANNOTATIONS
                if isinstance(metadata.get(name), tuple | jax.sharding.PartitionSpec)
            }
            return box.copy(**fitted) if fitted else box
        return box.replace(names=_fitted(box.names, *shapes))

    return jax.tree.map(fit, tree, params, is_leaf=_is_box)


def _is_box(node: Any) -> bool:
    boxes = _flax_types("flax.nnx", "Variable") + _flax_types("flax.core.meta", "Partitioned")
    return isinstance(node, boxes)


def _flax_types(module: str, name: str) -> tuple[Any, ...]:
    """A class of Flax, in a tuple; empty before the user imports Flax, which takes a second."""
    return (getattr(sys.modules[module], name),) if module in sys.modules else ()


def _fitted(names: Any, shape: tuple[int, ...], param_shape: tuple[int, ...]) -> Any:
    same_rank = len(shape) == len(param_shape)
    kept = [
        name if same_rank and size == param_shape[i] else None
        for i, (name, size) in enumerate(zip(names, shape, strict=False))
    ]
    return tuple(kept) if isinstance(names, tuple) else type(names)(*kept)
