"""An MLP that a model composes from its own layers, computed as one op, which saves less.

    GatedMLP   x + down(act(gate(norm(x))) * up(norm(x)))     with or without the norm and "x +"
    MLP        x + down(act(up(norm(x))))                     the same, with or without biases

A module's attributes do not say which layer is the gate, what the activation is, or whether x is
added. So `roles_of` computes every possibility in FP32 from random parameters and inputs, and takes
the one that agrees with the module. If none does, it raises an error. Inputs are small and large,
so that a module which clamps its numbers agrees with none.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from coat_jax import ops
from coat_jax.nn.children import has_own_parameters, modules_of, set_class
from coat_jax.nn.convertible import (
    NORMS,
    convert_layer,
    has_own_promotion,
    why_not_linear,
    why_not_norm,
)
from coat_jax.nn.mlp import MLP, GatedMLP
from coat_jax.nn.norm import LayerNorm, RMSNorm
from coat_jax.nn.parameters import value_of
from coat_jax.precision import Precision

MLPClass = type[GatedMLP] | type[MLP]
MLPS: dict[MLPClass, str] = {GatedMLP: "coat.nn.GatedMLP", MLP: "coat.nn.MLP"}
# The largest relative error at which two results agree. gelu and its approximation by tanh differ
# by less, so the best possibility is taken, not the first.
AGREEMENT = 1e-3
SIZES = 1.0, 30.0  # of the inputs


@dataclasses.dataclass(frozen=True)
class Roles:
    """The purposes of an MLP's layers, which are named by their paths within it."""

    norm: str | None
    gate: str | None
    up: str
    down: str
    activation: str
    residual: bool

    def __str__(self) -> str:
        if self.gate:
            return f"{self.down}({self.activation}({self.gate}) * {self.up})"
        return f"{self.down}({self.activation}({self.up}))"


class ConvertedMLP(nnx.Module):
    """A module that has the attributes of the one that it was, but computes a single op."""

    roles: Roles
    precision: Precision

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Applies the MLP to the last axis."""
        roles, layers = self.roles, _layers_of(self)
        up, down = layers[roles.up], layers[roles.down]
        dtype = up.dtype or jnp.result_type(x, up.kernel[...])
        # The residual stream is not rounded to the dtype of the layers.
        inside = roles.residual and x.dtype == dtype
        settings: dict[str, Any] = {"residual": inside, "precision": self.precision}
        settings["activation"] = roles.activation
        norm = None if roles.norm is None else layers[roles.norm].as_op_norm()
        of_x = x.astype(dtype), norm
        if roles.gate is None:
            weights = up.kernel[...], down.kernel[...], value_of(up.bias), value_of(down.bias)
            y = ops.mlp(*of_x, *weights, **settings)
        else:
            gated = (layers[path].kernel[...] for path in (roles.gate, roles.up, roles.down))
            y = ops.gated_mlp(*of_x, *gated, **settings)
        return x + y if roles.residual and not inside else y


def convert_mlp(module: Any, roles: Roles, precision: Precision) -> None:
    """Turns a module into a `ConvertedMLP`, in place."""
    if roles.norm is not None:
        convert_layer(_layers_of(module)[roles.norm], precision)
    set_class(module, ConvertedMLP)
    module.roles, module.precision = roles, precision


def _layers_of(module: nnx.Module) -> dict[str, Any]:
    return dict(modules_of(module))


def roles_of(module: nnx.Module, kind: MLPClass) -> Roles:
    """Finds out what the layers of `module` are for, if it computes a GatedMLP or an MLP.

    Raises:
        ValueError: if it does not.
    """
    inside = _layers_of(module)
    layers = {path: layer for path, layer in inside.items() if has_own_parameters(layer)}
    norms = [path for path, layer in layers.items() if _is_norm(layer)]
    linears = [path for path, layer in layers.items() if _is_linear(layer)]
    count = 3 if kind is GatedMLP else 2
    if len(linears) != count or len(norms) > 1 or len(layers) > len(linears) + len(norms):
        raise ValueError(f"it does not consist of {count} nnx.Linear and at most one norm")
    if any(layers[path].kernel.ndim != 2 for path in linears):
        raise ValueError("its layers are stacked, as nnx.vmap makes them")
    if kind is GatedMLP and any(layers[path].bias is not None for path in linears):
        raise ValueError("its layers have biases")
    if any(isinstance(m, nnx.Dropout) and m.rate > 0 for m in inside.values()):
        raise ValueError("it has Dropout, which the op does not compute")
    variables = nnx.split(module, nnx.Param, nnx.RngState, ...)[3]
    if names := [".".join(map(str, path)) for path, _ in nnx.to_flat_state(variables)]:
        raise ValueError(f"it has {names[0]}, a variable that the op does not see")
    with jax.ensure_compile_time_eval(), jax.default_matmul_precision("highest"):
        return _by_trial(_in_fp32(module), norms, linears)


def _is_norm(layer: nnx.Module) -> bool:
    if isinstance(layer, NORMS):
        return not why_not_norm(layer)
    return type(layer) in (RMSNorm, LayerNorm)


def _is_linear(layer: nnx.Module) -> bool:
    plain = type(layer) is nnx.Linear and not has_own_promotion(layer)
    return plain and not why_not_linear(layer)


def _by_trial(module: Any, norms: list[str], linears: list[str]) -> Roles:
    """The roles with which the layers of `module` compute the same as `module`."""
    layers = _layers_of(module)
    shapes = {path: layers[path].kernel.shape for path in linears}
    candidates = list(_candidates(shapes, norms[0] if norms else None))
    if not candidates:
        raise ValueError(f"the shapes of its layers are {sorted(shapes.values())}")
    failure: Exception | None = None
    for width in sorted({shapes[roles.up][0] for roles in candidates}):
        x = jax.random.normal(jax.random.key(0), (1, 4, width))
        try:
            examples = [(size * x, module(size * x)) for size in SIZES]
        except Exception as error:
            failure = error
            continue
        taken = [roles for roles in candidates if shapes[roles.up][0] == width]
        errors = {roles: _error(layers, roles, examples) for roles in taken}
        best = min(errors, key=errors.__getitem__)
        if not errors[best] < AGREEMENT:
            raise ValueError("it computes something else from its layers")
        return best
    raise ValueError(f"it cannot be called with one array: {failure}") from failure


def _error(layers: dict[str, Any], roles: Roles, examples: list[tuple[Array, Any]]) -> float:
    """The largest relative error of these layers in these roles."""
    errors = []
    for x, y in examples:
        if not isinstance(y, jax.Array) or y.shape != x.shape:
            return math.inf
        n = x if roles.norm is None else layers[roles.norm](x)
        act, up = ops.ACTIVATIONS[roles.activation], layers[roles.up](n)
        hidden = act(up) if roles.gate is None else act(layers[roles.gate](n)) * up
        ours = layers[roles.down](hidden) + (x if roles.residual else 0.0)
        errors.append(float(jnp.linalg.norm(ours - y) / jnp.linalg.norm(y)))
    return max(errors)


def _candidates(shapes: dict[str, tuple[int, ...]], norm: str | None) -> Iterator[Roles]:
    for paths in itertools.permutations(shapes):
        *before, down = paths
        width, hidden = shapes[before[0]]
        if shapes[down] != (hidden, width) or any(shapes[p] != (width, hidden) for p in before):
            continue
        gate = before[0] if len(before) > 1 else None
        for activation, residual in itertools.product(ops.ACTIVATIONS, (False, True)):
            yield Roles(norm, gate, before[-1], down, activation, residual)


def _in_fp32(module: nnx.Module) -> nnx.Module:
    """`module` with random parameters in FP32, and with layers that compute in FP32."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    random = [
        jax.random.normal(key, leaf.shape) * (leaf.shape[0] ** -0.5 if len(leaf.shape) > 1 else 1)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    copy = nnx.merge(graph, jax.tree.unflatten(tree, random), rest)
    for _, layer in modules_of(copy):
        if getattr(layer, "dtype", None) is not None:
            layer.dtype = jnp.float32
    return copy
