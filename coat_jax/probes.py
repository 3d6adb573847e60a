"""How ops return statistics of the tensors that they round: as the gradients of probes.

    y = op(x, probe)       the probe is zeros, and does not affect y
    d probe                what the op's backward pass returns for it: the statistics

A probe is an argument of an op like any other, so its "gradient" passes through everything that
gradients pass through: jit, scan over layers, recomputation, meshes of devices. It is summed
wherever gradients are. The compiled program has no callbacks and no side effects.

`coat_jax.telemetry` makes the probes and sets the `Scope` in which each op finds its probe while it
is traced. Without a scope the probe of an op is None, and its program is the same as without
telemetry.

The scope is part of the keys of JAX's caches of traced functions, so a layer that was traced within
a scope is not reused without one, nor vice versa.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import jax
from jaxtyping import Array, Float

_current = jax.make_user_context(default_value=None)


@partial(jax.tree_util.register_dataclass, data_fields=["sums"], meta_fields=["weights"])
@dataclasses.dataclass(frozen=True)
class Probe:
    """An argument of an op: for each tensor, zeros or the sums that the op has recorded.

    Attributes:
        sums: by the tensor's name within the op.
        weights: what the op's weights are called, in order.
    """

    sums: dict[str, Float[Array, "9"]]
    weights: tuple[str, ...]

    def with_sums(self, tensor: str, sums: Callable[[], Float[Array, "9"]]) -> "Probe":
        """The probe with the sums of a tensor; unchanged if it does not watch that tensor."""
        return Probe(self.sums | {tensor: sums()}, self.weights) if tensor in self.sums else self


OptionalProbe = Probe | None  # None without telemetry


class Found(dict[str, int | None]):
    """The tensors whose ops have asked for a probe, by name, and how many layers have each.

    The * in a name stands for the number of a layer; there is None for a name without a *. Being
    a static part of `LayerProbes`, it is compared by identity.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


class Scope:
    """Where ops look for probes.

    Attributes:
        found: the tensors so far.
        probes: by the names in `found`; None while names are only collected.
    """

    def __init__(
        self,
        found: Found,
        probes: Mapping[str, Array] | None,
        prefix: str = "",
        layers: int | None = None,
        taken: set[str] | None = None,
        weights: tuple[str, ...] = (),
    ):
        self.found, self.probes = found, probes
        self._prefix, self._layers = prefix, layers
        self._taken: set[str] = set() if taken is None else taken
        self._weights = weights

    def probe(
        self, op: str, tensors: Sequence[str], weights: Sequence[str], per_weight: Sequence[str]
    ) -> OptionalProbe:
        """The probe of an op, under names that no other op of the scope has."""
        weights = self._weights if len(self._weights) == len(weights) else tuple(weights)
        tensors = [*tensors, *(of_weight(w, tensor) for w in weights for tensor in per_weight)]
        base = self._free(op, tensors)
        names = {tensor: f"{base}/{tensor}" for tensor in tensors}
        self._taken.update(names.values())
        self.found.update(dict.fromkeys(names.values(), self._layers))
        if self.probes is None:
            return None
        probes = self.probes
        return Probe({t: probes[name] for t, name in names.items() if name in probes}, weights)

    def _free(self, op: str, tensors: Sequence[str]) -> str:
        """A free name: the scope's own, or else with the op's name added, or with a number."""
        full = f"{self._prefix}/{op}" if self._prefix else op
        base, number = self._prefix or op, 0
        while any(f"{base}/{tensor}" in self._taken for tensor in tensors):
            base, number = f"{full}_{number}" if number else full, number + 1
        return base

    def inner(self, name: str, weights: tuple[str, ...]) -> "Scope":
        """The scope of a part of this one."""
        prefix = "/".join(filter(None, (self._prefix, name)))
        return Scope(self.found, self.probes, prefix, self._layers, self._taken, weights)

    def layer_probes(self, name: str, count: int) -> "LayerProbes":
        """The probes of `count` layers that are traced once, as an argument for them."""
        prefix = f"{self._prefix}/{name}/*" if self._prefix else f"{name}/*"
        probes = None
        if self.probes is not None:
            probes = {n: p for n, p in self.probes.items() if n.startswith(f"{prefix}/")}
        return LayerProbes(probes, self.found, prefix, count)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["probes"],
    meta_fields=["found", "prefix", "count"],
)
@dataclasses.dataclass(frozen=True)
class LayerProbes:
    """The probes of a stack of layers, with a first axis over layers; or those of one layer.

    It is an argument of the layers, as their parameters are: its gradient has what the ops of each
    layer measured.
    """

    probes: dict[str, Array] | None
    found: Found
    prefix: str
    count: int

    def scope(self) -> Scope:
        """A scope in which the ops of one layer find their probes, for one tracing of it."""
        return Scope(self.found, self.probes, self.prefix, self.count)


# --- What ops and modules call ---------------------------------------------------------------


def probe(
    op: str, tensors: Sequence[str], weights: Sequence[str] = (), per_weight: Sequence[str] = ()
) -> OptionalProbe:
    """The probe of an op that is being traced; None without telemetry, or if nothing is FP8.

    Args:
        op: its name, used where no scope has named it, or where two ops would share names.
        tensors: what it rounds to FP8.
        weights: names of its weights, unless the scope has others.
        per_weight: what it rounds to FP8 for each weight.
    """
    scope: Scope | None = _current.value
    if scope is None or not (tensors or (weights and per_weight)):
        return None
    return scope.probe(op, tensors, weights, per_weight)


def of_weight(weight: str, tensor: str) -> str:
    """The name of a tensor that belongs to a weight, or to the only one."""
    return f"{weight}/{tensor}" if weight else tensor


@contextlib.contextmanager
def named(name: str, weights: tuple[str, ...] = ()) -> Iterator[None]:
    """Names a part of a model: all ops that are traced in this context.

    Args:
        name: the part, as in "attention"; "" keeps the name of the part around it.
        weights: names of the weights of ops that take this many, as in ("query", "key", "value").
    """
    scope: Scope | None = _current.value
    with contextlib.nullcontext() if scope is None else _current(scope.inner(name, weights)):
        yield


def layer_probes(name: str, count: int) -> LayerProbes | None:
    """The probes of `count` layers that are traced once; None without telemetry."""
    scope: Scope | None = _current.value
    return None if scope is None else scope.layer_probes(name, count)


def probes_of_layer(probes: LayerProbes | None, index: int) -> LayerProbes | None:
    """The probes of one layer, from those of all layers."""
    one: LayerProbes | None = jax.tree.map(lambda stacked: stacked[index], probes)
    return one


@contextlib.contextmanager
def layer_scope(probes: LayerProbes | None) -> Iterator[None]:
    """The scope of one layer, while it is traced."""
    with contextlib.nullcontext() if probes is None else _current(probes.scope()):
        yield


@contextlib.contextmanager
def set_scope(scope: Scope | None) -> Iterator[None]:
    """Sets the scope of the ops traced in this context; None turns telemetry off."""
    with _current(scope):
        yield
