"""compressed-tensors' layout: what `quantization_config` in config.json says of each projection.

    config_groups   groups of modules with one scheme: their names, patterns of names (re:..), or
                    "Linear" for all of them; of several that fit, a name comes first, then a
                    pattern, whatever their order
        weights             8 bits, a scale per channel; "int" or "float", which is E4M3
        input_activations   none; a scale per tensor; or one per token, "dynamic"
    ignore          modules that are not quantized
    format          how the codes are stored:
        int-quantized, float-quantized    weight [N, K] of codes
        pack-quantized                    weight_packed [N, K / 4] of four codes each
        mixed-precision                   as each group says

INT8 weights whose inputs are not rounded are packed: that is the only way in which vLLM reads them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from coat_jax.errors import UserError
from coat_jax.models import Config
from coat_jax.models.hf.names import HEAD, IN_LAYER
from coat_jax.numerics.eight_bits import EightBits
from coat_jax.ops.quantized import Activations
from coat_jax.quantization import patterns
from coat_jax.quantization.projections import paths_of
from coat_jax.quantization.recipe import Scheme
from coat_jax.validation import brief

Json = dict[str, Any]

ENTRY = "quantization_config"  # of config.json
METHOD = "compressed-tensors"
LINEAR = "Linear"  # torch's class, of all projections and the head
TYPES: dict[EightBits, str] = {"int8": "int", "fp8": "float"}
STRATEGIES: dict[Activations, str] = {"static": "tensor", "dynamic": "token"}
PACKED, MIXED = "pack-quantized", "mixed-precision"


def module_of(path: str) -> str:
    """The name of a projection in the files: model.layers.0.self_attn.q_proj."""
    _, layer, *name = path.split(".")
    return f"model.layers.{layer}.{IN_LAYER[tuple(name)].removesuffix('.weight')}"


def storage_of(scheme: Scheme) -> str:
    """The format in which codes are stored."""
    if scheme.format == "fp8":
        return "float-quantized"
    return PACKED if scheme.activations == "none" else "int-quantized"


def to_json(config: Config, schemes: Mapping[str, Scheme]) -> Json:
    """The quantization_config of a model."""
    paths = paths_of(config)
    kinds = sorted(set(schemes.values()))
    ignored = [module_of(path) for path in paths if path not in schemes]
    groups = {}
    for number, scheme in enumerate(kinds):
        targets = [module_of(path) for path in paths if schemes.get(path) == scheme]
        group = {"targets": targets if len(kinds) > 1 else [LINEAR], **_group_of(scheme)}
        if len(kinds) > 1:
            group["format"] = storage_of(scheme)
        groups[f"group_{number}"] = group
    return {
        "quant_method": METHOD,
        "quantization_status": "compressed",
        "format": MIXED if len(kinds) > 1 else storage_of(kinds[0]),
        "config_groups": groups,
        "ignore": [*ignored, HEAD.removesuffix(".weight")],
        "kv_cache_scheme": None,
    }


def from_json(data: Any, config: Config) -> dict[str, Scheme]:
    """The scheme of each projection that is quantized; raises for what coat_jax does not have."""
    if not isinstance(data, Mapping) or data.get("quant_method") != METHOD:
        method = data.get("quant_method") if isinstance(data, Mapping) else data
        raise UserError(
            f"config.json: quantization by {brief(method)} is not supported: coat_jax reads "
            f"{METHOD}."
        )
    for entry in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if data.get(entry):
            raise UserError(f"config.json: {ENTRY} has a {entry}, which coat_jax does not support.")
    groups, ignore = data.get("config_groups"), data.get("ignore") or []
    if not isinstance(groups, Mapping) or not isinstance(ignore, list):
        raise UserError(f"config.json: {ENTRY} has no config_groups that coat_jax can read.")
    ignored = [_target(text) for text in ignore]
    targets = []
    for name, group in groups.items():
        texts = group.get("targets") if isinstance(group, Mapping) else None
        if not isinstance(texts, list):
            raise UserError(f"config.json: {ENTRY}.{name} has targets={brief(texts)}.")
        targets += [(_target(text), name) for text in texts]
    _require_few_ways([*ignored, *(target for target, _ in targets)])
    schemes: dict[str, Scheme] = {}
    for path in paths_of(config):
        module = module_of(path)
        if any(target.pattern.match(module) for target in ignored):
            continue
        found = [(t.rank, name) for t, name in targets if t.pattern.match(module)]
        first = {name: groups[name] for rank, name in found if rank == min(found)[0]}
        if found:
            schemes[path] = _one_scheme(module, first)
    return schemes


def _group_of(scheme: Scheme) -> Json:
    """The entries of a group that describe a scheme."""
    shared = {"num_bits": 8, "type": TYPES[scheme.format], "symmetric": True}
    inputs = None
    if scheme.activations != "none":
        strategy, is_dynamic = STRATEGIES[scheme.activations], scheme.activations == "dynamic"
        inputs = {**shared, "strategy": strategy, "dynamic": is_dynamic}
    return {
        "weights": {**shared, "strategy": "channel", "dynamic": False},
        "input_activations": inputs,
        "output_activations": None,
    }


class _Target(NamedTuple):
    """A target of a group.

    Attributes:
        text: as it is in the file.
        rank: 0 for a name, 1 for a pattern, 2 for a class; the lowest one that fits counts.
        pattern: matches the names of its modules.
        ways: how many ways there are to match a name, at most.
    """

    text: str
    rank: int
    pattern: re.Pattern[str]
    ways: int = 0


def _target(value: Any) -> _Target:
    text = str(value)
    if text == LINEAR:
        return _Target(text, 2, re.compile(""))
    if not text.startswith("re:"):
        return _Target(text, 0, re.compile(rf"{re.escape(text)}\Z"))
    try:
        return _Target(text, 1, *patterns.compile_bounded(text.removeprefix("re:")))
    except ValueError as error:
        raise UserError(
            f"config.json: {ENTRY} has the pattern {brief(text)}, which is not matched: {error}. "
            "Write a simpler one, or the names themselves."
        ) from None


def _require_few_ways(targets: Sequence[_Target]) -> None:
    """Raises if matching all patterns could take very long."""
    if sum(target.ways for target in targets) > patterns.MOST_WAYS:
        worst = max(targets, key=lambda target: target.ways)
        raise UserError(
            f"config.json: {ENTRY} has patterns that could match a name in more than "
            f"{patterns.MOST_WAYS:,} ways, {brief(worst.text)} in most of them. Write one with "
            "fewer quantifiers, or the names themselves."
        )


def _one_scheme(module: str, groups: Mapping[str, Any]) -> Scheme:
    """The scheme of a module, on which the groups that name it agree."""
    schemes = {name: _scheme(name, group) for name, group in groups.items()}
    if len(set(schemes.values())) > 1:
        raise UserError(
            f"config.json: {ENTRY} has {' and '.join(schemes)} for {module}, and they quantize it "
            "differently: leave it in one of them."
        )
    return next(iter(schemes.values()))


def _scheme(name: str, group: Json) -> Scheme:
    for scheme in (Scheme(f, a) for f in TYPES for a in get_args(Activations)):
        if all(_says(group.get(entry), value) for entry, value in _group_of(scheme).items()):
            return scheme
    raise UserError(
        f"config.json: {ENTRY}.{name} is a scheme that coat_jax does not support. It supports "
        "symmetric 8-bit weights with a scale per channel, inputs that are not quantized, have one "
        "scale or a dynamic scale per token, and outputs that are not quantized."
    )


def _says(data: Any, expected: Json | None) -> bool:
    if expected is None:
        return data is None
    return isinstance(data, Mapping) and all(data.get(k) == v for k, v in expected.items())
