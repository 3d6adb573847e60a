"""How ops return statistics of the tensors that they round: as the gradients of probes.

    y = op(x, probe)       the probe is zeros, and does not affect y
    d probe                what the op's backward pass returns for it: the statistics

A probe is an argument of an op like any other, so its "gradient" passes through everything that
gradients pass through: jit, scan over layers, recomputation, meshes of devices. It is summed
wherever gradients are. The compiled program has no callbacks and no side effects.

`coat_jax.telemetry` makes the probes and sets `current_scope`, in which each op finds its probe
while it is traced. Without a scope the probe of an op is None, and its program is the same as
without telemetry.

The scope is part of the keys of JAX's caches of traced functions, so a layer that was traced within
a scope is not reused without one, nor vice versa.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import jax
from jaxtyping import Array, Float

# For each tensor that an op rounds, by its name within the op: zeros, or its statistics.
Probe = dict[str, Float[Array, "9"]]
OptionalProbe = Probe | None  # None without telemetry


class Found(dict[str, int | None]):
    """The tensors whose ops have asked for a probe, by name, and how many layers have each.

    The * in a name stands for the number of a layer; there is None for a name without a *. Being
    a static part of a `Scope`, it is compared by identity.
    """

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["probes"],
    meta_fields=["found", "prefix", "layers", "weights"],
    drop_fields=["taken"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Scope:
    """Where ops find their probes. That of a stack of layers is an argument of the layers.

    Attributes:
        found: the tensors so far.
        probes: by the names in `found`; None while names are only collected.
        prefix: of the names of tensors.
        layers: how many layers have tensors of these names; None outside of a stack of layers.
        weights: names of the weights of ops that take this many.
        taken: the names of tensors in this tracing.
    """

    found: Found
    probes: Mapping[str, Array] | None
    prefix: str = ""
    layers: int | None = None
    weights: tuple[str, ...] = ()
    taken: set[str] = dataclasses.field(default_factory=set)


current_scope = jax.make_user_context(default_value=None)


def probe(
    op: str, tensors: Sequence[str], weights: Sequence[str] = (), per_weight: Sequence[str] = ()
) -> OptionalProbe:
    """The probe of an op that is being traced; None without telemetry, or if nothing is FP8.

    Args:
        op: its name, used where no scope has named it, or where two ops would share names.
        tensors: what it rounds to FP8.
        weights: names of its weights, unless the scope has others.
        per_weight: what it rounds to FP8 for each weight; "gradient/1" in the probe is that of the
            second one.
    """
    scope: Scope | None = current_scope.value
    if scope is None or not (tensors or (weights and per_weight)):
        return None
    weights = scope.weights if len(scope.weights) == len(weights) else weights
    within = {tensor: tensor for tensor in tensors}
    for i, weight in enumerate(weights):
        within |= {f"{tensor}/{i}": _join(weight, tensor) for tensor in per_weight}
    # The first name that no other op has: the scope's own, the op's in it, the op's with a number.
    full = _join(scope.prefix, op)
    numbered = (f"{full}_{number}" for number in itertools.count(1))
    for base in itertools.chain([scope.prefix or op, full], numbered):
        names = {tensor: f"{base}/{name}" for tensor, name in within.items()}
        if scope.taken.isdisjoint(names.values()):
            break
    scope.taken.update(names.values())
    scope.found.update(dict.fromkeys(names.values(), scope.layers))
    if scope.probes is None:
        return None
    return {t: scope.probes[name] for t, name in names.items() if name in scope.probes}


def _join(*parts: str) -> str:
    return "/".join(filter(None, parts))


@contextlib.contextmanager
def named(name: str, weights: tuple[str, ...] = ()) -> Iterator[None]:
    """Names a part of a model: all ops that are traced in this context.

    Args:
        name: the part, as in "attention"; "" keeps the name of the part around it.
        weights: names of the weights of ops that take this many, as in ("query", "key", "value").
    """
    scope: Scope | None = current_scope.value
    if scope is not None:
        scope = dataclasses.replace(scope, prefix=_join(scope.prefix, name), weights=weights)
    with current_scope(scope):
        yield


def layer_probes(name: str, count: int) -> Scope | None:
    """The scope of `count` layers that are traced once; None without telemetry.

    It is an argument of the layers, as their parameters are. Probes have a first axis over layers.
    """
    scope: Scope | None = current_scope.value
    if scope is None:
        return None
    prefix, probes = _join(scope.prefix, name, "*"), scope.probes
    if probes is not None:
        probes = {n: p for n, p in probes.items() if n.startswith(f"{prefix}/")}
    return Scope(scope.found, probes, prefix, count)


def probes_of_layer(scope: Scope | None, index: int) -> Scope | None:
    """The scope of one layer, from that of all layers."""
    one: Scope | None = jax.tree.map(lambda stacked: stacked[index], scope)
    return one


def layer_scope(scope: Scope | None) -> contextlib.AbstractContextManager[None]:
    """Sets the scope of one layer for one tracing of it; None leaves the scope as it is."""
    # Each tracing of a layer gives its ops the same names.
    here = current_scope.value if scope is None else dataclasses.replace(scope, taken=set())
    context: contextlib.AbstractContextManager[None] = current_scope(here)
    return context
