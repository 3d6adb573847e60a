"""Turns a Flax NNX model into an FP8 one, keeping its parameters and their names.

    Linear, LinearGeneral, Einsum    keep their class; their products become FP8
    RMSNorm, LayerNorm               become those of coat.nn, which save FP8 blocks
    Embed in 16 bits                 becomes that of coat.nn, which sums its gradient in FP32
    an MLP that a rule names         becomes one op, which saves FP8 blocks

Modules are named by their paths, as in "layers.3.attn.query". Rules map globs of whole paths to
precisions; the first that matches wins. * stands for any text, dots included, and ? for one
character. A rule for an MLP says which kind it is:

    coat.nn.convert(model, rules={"head": "bf16", "layers.*.mlp": coat.nn.GatedMLP})

`plan_conversion` says what would become of each module, and why some are left alone. With inputs
of the model, it also says how many bytes each one saves for its backward pass.

What a model computes between its modules, such as silu(gate(x)) * up(x), saves its inputs in their
own dtype, and layers that read the same array save a copy in FP8 each, which may take more memory
than before. The plan shows this, and names a rule that helps, if it knows one.
"""

import contextlib
import logging
import re
from typing import Any

from flax import nnx

from coat_jax.nn.bytes_saved import Saved, bytes_of, saved_by_module
from coat_jax.nn.children import modules_of, require_module
from coat_jax.nn.converted_mlp import MLPS, convert_mlp, roles_of
from coat_jax.nn.convertible import convert_layer
from coat_jax.nn.plan import THE_MODEL, Decision, Plan, Rules, decide
from coat_jax.precision import COAT, Precision, precision_of

_log = logging.getLogger("coat_jax")
BETWEEN = "it computes between its modules"
RAISED = (
    "The conversion raises what is saved: layers that read the same array save a copy of it each, "
    "in FP8. coat.nn.Attention, coat.nn.GatedMLP and coat.ops.norm_linear save one copy for all."
)
SMALL = 0.01  # a smaller share of all saved bytes needs no remedy


def convert(
    model: nnx.Module, precision: Precision | str = COAT, rules: Rules | None = None
) -> nnx.Module:
    """A copy of `model` whose layers compute in FP8; the arrays are shared, not copied.

    The logger "coat_jax" reports at level INFO which modules are left alone, and why, and warns if
    all are although `precision` is one in FP8.

    Args:
        model: any NNX model.
        precision: of all modules for which there is no rule, and of MLPs that a rule names.
        rules: globs of paths, and the precision of what they match; the first one wins.
            coat.nn.GatedMLP or coat.nn.MLP instead of a precision turns a module that computes such
            an MLP into one op.

    Example:
        >>> import coat_jax as coat
        >>> from flax import nnx
        >>> rngs = nnx.Rngs(0)
        >>> model = nnx.Sequential(nnx.RMSNorm(64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs))
        >>> print(coat.nn.plan_conversion(model, rules={"layers.1": "bf16"}))
        module    class    becomes
        layers.0  RMSNorm  FP8
        layers.1  Linear   unchanged: its precision, by the rule 'layers.1', is not FP8
        <BLANKLINE>
        To see what modules save, give the shapes of the inputs: inputs=...
        >>> type(coat.nn.convert(model, rules={"layers.1": "bf16"}).layers[0])
        <class 'coat_jax.nn.norm.RMSNorm'>
    """
    require_module("convert", model)
    precision = precision_of(precision)
    plan = decide(model, precision, rules or {})
    for decision in plan:
        if decision.precision is None:
            name = decision.path or THE_MODEL
            _log.info("left alone: %s (%s): %s", name, decision.kind, decision.reason)
    if precision.fp8_linear and all(decision.precision is None for decision in plan):
        kind = type(model).__name__
        _log.warning("Nothing of this %s was converted: coat.nn.plan_conversion says why.", kind)
    return _convert_by(plan, model)


def plan_conversion(
    model: nnx.Module,
    precision: Precision | str = COAT,
    rules: Rules | None = None,
    *,
    inputs: Any = None,
) -> Plan:
    """Returns what `convert` would do to each layer of `model` that has parameters of its own.

    Args:
        model: any NNX model.
        precision: see `convert`.
        rules: see `convert`.
        inputs: of the model, arrays or `jax.ShapeDtypeStruct`; several are a tuple. With them the
            plan counts what each module saves for its backward pass, before and after; nothing
            runs.
    """
    require_module("plan_conversion", model)
    plan = decide(model, precision_of(precision), rules or {})
    if inputs is None:
        return plan
    inputs = inputs if isinstance(inputs, tuple | list) else (inputs,)
    after = saved_by_module(_convert_by(plan, model), *inputs)
    plan = _add_counts(plan, model, saved_by_module(model, *inputs), after)
    if any(decision.remedy == RAISED for decision in plan):
        _log.warning(RAISED)
    return plan


def _convert_by(plan: Plan, model: nnx.Module) -> nnx.Module:
    """A copy of `model`, converted as the plan says."""
    chosen = {decision.path: decision for decision in plan}
    copy: nnx.Module = nnx.merge(*nnx.split(model))
    for path, module in list(modules_of(copy)):
        decision = chosen.get(path)
        if decision is None or decision.precision is None:
            continue
        if decision.roles is not None:
            convert_mlp(module, decision.roles, decision.precision)
        else:
            convert_layer(module, decision.precision)
    return copy


def _add_counts(plan: Plan, model: nnx.Module, before: Saved, after: Saved) -> Plan:
    """Returns the plan with all modules that save bytes, how many, and what could save less.

    Args:
        plan: the decisions.
        model: the model that the plan is for.
        before: what its modules save.
        after: what they save after the conversion.
    """
    decided = {decision.path: decision for decision in plan}
    replaced = tuple(f"{decision.path}." for decision in plan if decision.roles is not None)
    old, new = (sum(map(bytes_of, saved.values())) for saved in (before, after))
    saving = before.keys() | after.keys()
    result = Plan()
    for path, module in modules_of(model):
        if path.startswith(replaced) or not (path in decided or path in saving):
            continue
        unchanged = path, type(module).__name__, None, BETWEEN, f"unchanged: {BETWEEN}"
        decision = decided.get(path, Decision(*unchanged))
        below = f"{path}."  # an op counts what its layers saved
        mine = [p for p in saving if p == path or (below in replaced and p.startswith(below))]
        count, count_after = (
            sum(bytes_of(saved.get(p, [])) for p in mine) for saved in (before, after)
        )
        remedy, wide = "", bytes_of(after.get(path, []), above=1)
        if decision.reason == BETWEEN and wide > SMALL * new:
            remedy = _remedy(path, module, wide)
        elif new > old and count_after > count:
            remedy = RAISED
        result.append(decision._replace(before=count, after=count_after, remedy=remedy))
    return result


def _remedy(path: str, module: nnx.Module, size: int) -> str:
    """How to save less than `size` bytes of what a module computes between its modules."""
    glob = re.sub(r"\b\d+\b", "*", path)
    for kind, name in MLPS.items():
        with contextlib.suppress(ValueError):
            if path and roles_of(module, kind):
                return f'{glob} saves less as one op. Add to the rules: {{"{glob}": {name}}}.'
    saves = f"{glob or 'The model'} saves {size:,} bytes with more than 8 bits per element"
    if isinstance(module, nnx.MultiHeadAttention):
        return (
            f"{saves}. Without masks and dropout, build it with "
            "attention_fn=coat.nn.attention_fn()."
        )
    return (
        f"{saves}, from what it computes between its modules. Use functions of coat.ops there, "
        "such as activate and attention, or wrap it in coat.ops.recompute."
    )
