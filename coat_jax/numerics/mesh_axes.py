"""One entry of a PartitionSpec: None, the name of a mesh axis, or several names."""

import math
from typing import Any


def names(entry: Any) -> tuple[str, ...]:
    """The mesh axes that an array axis is sharded over."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def shards(entry: Any, mesh: Any) -> int:
    """How many shards an array axis has on a mesh, concrete or abstract."""
    return math.prod(mesh.shape[name] for name in names(entry))
