"""The rules of a conversion: what becomes of each module, by its class and its path."""

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from coat_jax.nn.children import children, has_own_parameters
from coat_jax.nn.converted_mlp import MLPClass, Roles, roles_of
from coat_jax.nn.convertible import LINEAR, NORMS, why_not_embed, why_not_linear, why_not_norm
from coat_jax.nn.mlp import MLP, GatedMLP
from coat_jax.nn.plan import Decision, Plan
from coat_jax.precision import Precision, precision_of

Rules = Mapping[str, Precision | str | MLPClass]

IN_FP32 = "coat.nn.Embed, whose gradient is summed in FP32"
MLPS: dict[MLPClass, str] = {GatedMLP: "coat.nn.GatedMLP", MLP: "coat.nn.MLP"}


def decide(model: nnx.Module, precision: Precision, rules: Rules) -> Plan:
    """A decision for each module with parameters of its own, or that a rule turns into an MLP."""
    settings = {glob: _setting(value) for glob, value in rules.items()}
    plan, paths, replaced = Plan(), [], None
    known: dict[Any, Roles] = {}
    decided: dict[int, Decision] = {}
    modules = [(path, module) for _, _, path, module in children(model)]
    if isinstance(model, (*LINEAR, *NORMS, nnx.Embed)):
        modules.insert(0, ("", model))
    for path, module in modules:
        paths.append(path)
        if replaced is not None and path.startswith(f"{replaced}."):
            continue
        rule = next((glob for glob in settings if fnmatch.fnmatchcase(path, glob)), None)
        setting = precision if rule is None else settings[rule]
        if not isinstance(setting, Precision):
            roles = _required_roles(path, module, setting, rule, known)
            kind, becomes = type(module).__name__, _products(precision)
            plan.append(Decision(path, kind, precision, "", rule, roles, becomes=becomes))
            replaced = path
        elif has_own_parameters(module):
            plan.append(_decide(path, module, setting, rule))
            _require_agreement(plan[-1], decided.setdefault(id(module), plan[-1]))
    for glob in settings:
        _require_match(glob, paths)
    return plan


def suggest_kind(module: nnx.Module) -> MLPClass | None:
    """The kind of MLP that `module` computes, if it computes one."""
    for kind in MLPS:
        try:
            roles_of(module, kind)
        except ValueError:
            continue
        return kind
    return None


def _setting(value: Precision | str | MLPClass) -> Precision | MLPClass:
    if isinstance(value, type):
        if value not in MLPS:
            raise TypeError(
                f"A rule takes a precision or {' or '.join(MLPS.values())}, not {value}."
            )
        return value
    return precision_of(value)


def _decide(path: str, module: nnx.Module, precision: Precision, rule: str | None) -> Decision:
    kind = type(module).__name__
    reason, becomes = "", "FP8"
    source = "its precision" if rule is None else f"its precision, by the rule {rule!r},"
    if isinstance(module, LINEAR):
        becomes = _products(precision)
        reason = why_not_linear(module) if precision.fp8_linear else f"{source} is not FP8"
    elif isinstance(module, NORMS):
        reason = why_not_norm(module) if precision.block else f"{source} leaves norms unchanged"
    elif isinstance(module, nnx.Embed):
        fp8 = precision.fp8_linear or precision.block
        reason = why_not_embed(module) if fp8 else f"{source} is not FP8"
        becomes = IN_FP32
    elif type(module).__module__.startswith("coat_jax.nn"):
        reason = "it already has a precision"
    else:
        reason = "there is no FP8 version of this kind of module"
    chosen = None if reason else precision
    return Decision(path, kind, chosen, reason, rule, becomes=becomes)


def _products(precision: Precision) -> str:
    """The formats of a layer's products."""
    return "INT8 and FP8" if precision.int8_forward else "FP8"


def _require_agreement(decision: Decision, first: Decision) -> None:
    """Raises where rules decide differently on one module that has two paths."""
    if decision.precision != first.precision:
        by_rule = decision.rule or first.rule
        raise ValueError(
            f"{decision.path} and {first.path} are the same module, and the rule {by_rule!r} is "
            "for only one of them. Name both paths in the rules, with the same precision."
        )


def _required_roles(
    path: str, module: nnx.Module, kind: MLPClass, rule: str | None, known: dict[Any, Roles]
) -> Roles:
    """`roles_of` a module that a rule names; equal modules are tried only once."""
    graph, state = nnx.split(module)
    key = kind, graph, tuple(leaf.shape for leaf in jax.tree.leaves(state))
    try:
        if key not in known:
            known[key] = roles_of(module, kind)
        return known[key]
    except ValueError as error:
        raise ValueError(
            f"The rule {rule!r} says that {path} ({type(module).__name__}) computes what "
            f"{MLPS[kind]} does, but {error}. Narrow the rule, or build the module with "
            f"{MLPS[kind]}."
        ) from error


def _require_match(glob: str, paths: list[str]) -> None:
    if not fnmatch.filter(paths, glob):
        near = difflib.get_close_matches(glob, paths, 3, 0.3) or sorted(paths)[:3]
        example = near[0].rpartition(".")[2] if near else "head"
        raise ValueError(
            f"No module matches the rule {glob!r}. Rules are globs of whole paths, such as "
            f"'*.{example}'. The model has {near}."
        )
