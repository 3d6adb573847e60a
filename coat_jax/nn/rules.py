"""The rules of a conversion: what becomes of each module, by its class and its path."""

import difflib
import fnmatch
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from coat_jax.nn.children import has_own_parameters, modules_of
from coat_jax.nn.converted_mlp import MLPS, MLPClass, Roles, roles_of
from coat_jax.nn.convertible import formats_of, why_not
from coat_jax.nn.plan import Decision, Plan
from coat_jax.precision import Precision, precision_of

Rules = Mapping[str, Precision | str | MLPClass]


def decide(model: nnx.Module, precision: Precision, rules: Rules) -> Plan:
    """A decision for each module with parameters of its own, or that a rule turns into an MLP."""
    settings = {glob: _setting(value) for glob, value in rules.items()}
    plan, paths, replaced = Plan(), [], None
    known: dict[Any, Roles] = {}
    decided: dict[int, Decision] = {}
    for path, module in modules_of(model):
        own = has_own_parameters(module)
        if path or own:
            paths.append(path)
        if not (path or own) or (replaced is not None and path.startswith(f"{replaced}.")):
            continue
        rule = next((glob for glob in settings if fnmatch.fnmatchcase(path, glob)), None)
        setting = precision if rule is None else settings[rule]
        kind, formats = type(module).__name__, formats_of(module, precision)
        if not isinstance(setting, Precision):
            roles = _required_roles(path, module, setting, rule, known)
            becomes = f"{formats}, as one op: {roles}"
            plan.append(Decision(path, kind, precision, "", becomes, rule, roles))
            replaced = path
        elif own:
            source = "its precision" if rule is None else f"its precision, by the rule {rule!r},"
            reason = why_not(module, setting, source)
            becomes = f"unchanged: {reason}" if reason else formats_of(module, setting)
            chosen = None if reason else setting
            plan.append(Decision(path, kind, chosen, reason, becomes, rule))
            _require_agreement(plan[-1], decided.setdefault(id(module), plan[-1]))
    for glob in settings:
        _require_match(glob, paths)
    return plan


def _setting(value: Precision | str | MLPClass) -> Precision | MLPClass:
    if isinstance(value, type):
        if value not in MLPS:
            raise TypeError(
                f"A rule takes a precision or {' or '.join(MLPS.values())}, not {value}."
            )
        return value
    return precision_of(value)


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
