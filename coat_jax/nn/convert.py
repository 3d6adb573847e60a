"""Turns a Flax NNX model into an FP8 one, keeping its parameters.

    Linear, LinearGeneral, Einsum    keep their class; their products become FP8
    RMSNorm, LayerNorm               become those of coat.nn, which keep FP8 blocks

Modules are named by their paths, as in "layers.3.attn.query". Rules map globs of whole paths to
precisions, the first that matches wins. * stands for any text, dots included, and ? for one
character:

    coat.nn.convert(model, rules={"head": "bf16", "layers.0.*": coat.FP8_LINEAR})

`plan_conversion` says what would become of each module, and why some are left alone.

Only modules are replaced. What a model computes between them, as silu(gate(x)) * up(x), saves its
inputs in their own dtype: coat.nn.GatedMLP, or coat.ops.gated_mlp, saves them in FP8.
"""

import difflib
import fnmatch
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from coat_jax import ops
from coat_jax.nn.norm import LayerNorm, RMSNorm
from coat_jax.precision import COAT, Precision, precision_of

Rules = Mapping[str, Precision | str]

LINEAR = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
NORMS = (nnx.RMSNorm, nnx.LayerNorm)
_log = logging.getLogger("coat_jax")


class Decision(NamedTuple):
    """What becomes of one module.

    Attributes:
        path: of the module.
        kind: its class.
        precision: the new one; None if the module is left alone.
        reason: why it is left alone; empty if it is not.
        rule: the rule that matched it; None if none did.
    """

    path: str
    kind: str
    precision: Precision | None
    reason: str
    rule: str | None = None


def convert(
    model: nnx.Module, precision: Precision | str = COAT, rules: Rules | None = None
) -> nnx.Module:
    """A copy of `model` whose layers compute in FP8; the arrays are shared, not copied.

    What is left alone, and why, is logged by the logger "coat_jax" at level INFO.

    Args:
        model: any NNX model.
        precision: of all modules for which there is no rule.
        rules: globs of paths, and the precision of what they match; the first one wins.
    """
    plan = plan_conversion(model, precision, rules)
    copy = nnx.merge(*nnx.split(model))
    chosen = {decision.path: decision.precision for decision in plan}
    done: dict[int, Any] = {}
    for owner, key, path, module in list(_children(copy)):
        if (new := chosen.get(path)) is None:
            continue
        if id(module) not in done:
            done[id(module)] = _converted(module, new)
        if isinstance(key, int):
            owner[key] = done[id(module)]
        else:
            setattr(owner, key, done[id(module)])
    for decision in plan:
        if decision.precision is None:
            _log.info("left alone: %s (%s): %s", decision.path, decision.kind, decision.reason)
    return copy


def plan_conversion(
    model: nnx.Module, precision: Precision | str = COAT, rules: Rules | None = None
) -> list[Decision]:
    """What `convert` would do to each layer of `model` that has parameters of its own."""
    if not isinstance(model, nnx.Module):
        raise TypeError(f"convert takes a Flax NNX module, not {type(model).__name__}.")
    patterns = {pattern: precision_of(p) for pattern, p in (rules or {}).items()}
    default = precision_of(precision)
    plan, paths = [], []
    for _, _, path, module in _children(model):
        paths.append(path)
        if not _own_parameters(module):
            continue
        rule = next((glob for glob in patterns if fnmatch.fnmatchcase(path, glob)), None)
        chosen = default if rule is None else patterns[rule]
        plan.append(_decide(path, module, chosen, rule))
    for pattern in patterns:
        if not fnmatch.filter(paths, pattern):
            near = difflib.get_close_matches(pattern, paths, 3, 0.3) or sorted(paths)[:3]
            example = near[0].rpartition(".")[2] if near else "head"
            raise ValueError(
                f"No module matches the rule {pattern!r}. Rules are globs of whole paths, as "
                f"'*.{example}'. There are {near}."
            )
    return plan


def saved_bytes(module: nnx.Module, *inputs: Any) -> int:
    """Bytes that the backward pass of `module(*inputs)` needs besides parameters: nothing runs.

    Call it on a model, or on one of its modules, before and after `convert`.
    """
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    own = {leaf.shape for leaf in jax.tree.leaves(params)}

    def saved(params: Any, rest: Any, *inputs: Any) -> list[Any]:
        _, pull = jax.vjp(lambda p: nnx.merge(graph, p, rest)(*inputs), params)
        return list({id(leaf): leaf for leaf in jax.tree.leaves(pull) if leaf.ndim}.values())

    leaves = jax.eval_shape(saved, params, rest, *inputs)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.shape not in own)


def _decide(path: str, module: nnx.Module, precision: Precision, rule: str | None) -> Decision:
    kind = type(module).__name__
    reason = ""
    source = "its precision" if rule is None else f"its precision, by the rule {rule!r},"
    if isinstance(module, LINEAR):
        reason = _why_not_linear(module) if precision.fp8_linear else f"{source} is not FP8"
    elif isinstance(module, NORMS):
        reason = _why_not_norm(module) if precision.block else f"{source} keeps norms as is"
    elif type(module).__module__.startswith("coat_jax.nn"):
        reason = "it has a precision of its own"
    else:
        reason = "there is no FP8 version of this kind of module"
    return Decision(path, kind, None if reason else precision, reason, rule)


def _why_not_linear(module: Any) -> str:
    if isinstance(module, nnx.Einsum):
        return _why_not_einsum(module)
    if isinstance(module, nnx.LinearGeneral) and module.batch_axis:
        return "its weight has batch axes"
    own = getattr(module, "dot_general_cls", None) or module.dot_general
    return "" if own in (None, jax.lax.dot_general) else "it has a dot_general of its own"


def _why_not_einsum(module: nnx.Einsum) -> str:
    if module.einsum_op is not jnp.einsum:
        return "it has an einsum_op of its own"
    if module.einsum_str is None:
        return "its equation is known only when it is called"
    inputs, _, output = module.einsum_str.replace(" ", "").partition("->")
    x, _, w = inputs.partition(",")
    if "." in w or set(x) & set(w) & set(output):
        return f"its weight has batch axes: {module.einsum_str}"
    return ""


def _why_not_norm(module: Any) -> str:
    last = all(axes in (-1, (-1,)) for axes in (module.reduction_axes, module.feature_axes))
    if not last or module.axis_name is not None:
        return "it normalizes other axes than the last"
    return ""


def _converted(module: Any, precision: Precision) -> nnx.Module:
    """The FP8 version of a module that `_decide` accepted, with its parameters."""
    if isinstance(module, nnx.Einsum):
        module.einsum_op = ops.Einsum(precision)
        return module
    if isinstance(module, LINEAR):
        module.dot_general = ops.DotGeneral(precision)
        return module
    kind = RMSNorm if isinstance(module, nnx.RMSNorm) else LayerNorm
    new = nnx.eval_shape(lambda: kind(module.num_features, epsilon=module.epsilon))
    new.precision = precision
    new.scale = nnx.data(module.scale)
    if kind is LayerNorm:
        new.bias = nnx.data(module.bias)
    return new


# --- The modules of a model ------------------------------------------------------------------


def _children(
    module: Any, path: str = "", seen: frozenset[int] = frozenset()
) -> Iterator[tuple[Any, str | int, str, nnx.Module]]:
    """Every module below this one: its owner, its name or number there, its path, itself."""
    items: list[tuple[str | int, Any]]
    if isinstance(module, nnx.List | list):
        items = list(enumerate(module))
    elif isinstance(module, dict):
        items = list(module.items())
    else:
        items = [(k, v) for k, v in vars(module).items() if not k.startswith("_")]
    for key, value in items:
        if not isinstance(value, nnx.Module | list | dict) or id(value) in seen:
            continue
        below = f"{path}.{key}" if path else str(key)
        if isinstance(value, nnx.Module) and not isinstance(value, nnx.List | nnx.Dict):
            yield module, key, below, value
        yield from _children(value, below, seen | {id(module)})


def _own_parameters(module: nnx.Module) -> bool:
    """Whether a module has parameters that are not those of a module within it."""
    return any(isinstance(value, nnx.Param) for value in vars(module).values())
