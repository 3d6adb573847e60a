"""compressed-tensors' layout: what `quantization_config` in config.json says of each projection.

    config_groups   groups of modules with one scheme: their names, patterns of names (re:..), or
                    "Linear" for all of them; of several that fit, a name comes first, then a
                    pattern, whatever their order
        weights             8 bits, a scale per channel; "int" or "float", which is E4M3; or 4
                            bits, "int", a scale for every 128 inputs
        input_activations   none; a scale per tensor; or one per token, "dynamic"
    ignore          modules that are not quantized
    format          how the codes are stored:
        int-quantized, float-quantized    weight [N, K] of codes
        pack-quantized                    weight_packed [N, K / 4] of four codes each, or of INT4
                                          [N, K / 8] of eight
        mixed-precision                   as each group says

INT8 weights whose inputs are not rounded are packed: that is the only way in which vLLM reads them.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, get_args

import numpy as np

from coat_jax.errors import UserError
from coat_jax.models import Config
from coat_jax.models.hf.names import HEAD, IN_LAYER
from coat_jax.numerics.four_bits import GROUP
from coat_jax.ops.quantized import Activations, WeightFormat
from coat_jax.quantization import patterns
from coat_jax.quantization.projections import paths_of
from coat_jax.quantization.recipe import Scheme
from coat_jax.validation import brief

Json = dict[str, Any]

ENTRY = "quantization_config"  # of config.json
METHOD = "compressed-tensors"
LINEAR, PATTERN = "Linear", "re:"  # torch's class, of all projections and the head
TYPES: dict[WeightFormat, str] = {"int8": "int", "fp8": "float", "int4": "int"}
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
    is_packed = scheme.format == "int4" or scheme.activations == "none"
    return PACKED if is_packed else "int-quantized"


def pack_eight(u: np.ndarray) -> np.ndarray:
    """INT4 codes [N, K] as I32 [N, K / 8], the first of eight in the lowest four bits."""
    return np.ascontiguousarray(u[:, ::2] | u[:, 1::2] << 4).view("<i4")


def to_json(config: Config, schemes: Mapping[str, Scheme]) -> Json:
    """The quantization_config of a model."""
    paths = paths_of(config)
    kinds = sorted(set(schemes.values()))
    ignored = [module_of(path) for path in paths if path not in schemes]
    groups = {}
    for number, scheme in enumerate(kinds):
        targets = [module_of(path) for path in paths if schemes.get(path) == scheme]
        group = {"targets": targets if len(kinds) > 1 else [LINEAR], **_group_of(scheme)}
        if len(kinds) > 1 or scheme.format == "int4":  # other readers would guess another
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
            f"{METHOD}, and awq and gptq in INT4."
        )
    for entry in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if data.get(entry):
            raise UserError(f"config.json: {ENTRY} has a {entry}, which coat_jax does not support.")
    groups, ignore = data.get("config_groups"), data.get("ignore") or []
    if not isinstance(groups, Mapping) or not isinstance(ignore, list):
        raise UserError(f"config.json: {ENTRY} has no config_groups that coat_jax can read.")
    for name, group in groups.items():
        texts = group.get("targets") if isinstance(group, Mapping) else None
        if not isinstance(texts, list):
            raise UserError(f"config.json: {ENTRY}.{name} has targets={brief(texts)}.")
    targets = [(str(text), name) for name, group in groups.items() for text in group["targets"]]
    ignored = [*map(str, ignore)]
    path_of = {module_of(path): path for path in paths_of(config)}
    matches = _matches([*ignored, *(text for text, _ in targets)], path_of)
    schemes: dict[str, Scheme] = {}
    for module, path in path_of.items():
        found = [(_rank(text), name) for text, name in targets if module in matches[text]]
        if not found or any(module in matches[text] for text in ignored):
            continue
        first = {name: _scheme(name, groups[name]) for rank, name in found if rank == min(found)[0]}
        if len(set(first.values())) > 1:
            raise UserError(
                f"config.json: {ENTRY} has {' and '.join(first)} for {module}, and they quantize "
                "it differently: leave it in one of them."
            )
        schemes[path] = next(iter(first.values()))
    return schemes


def _rank(text: str) -> int:
    """0 for a name, 1 for a pattern, 2 for a class; the lowest one that fits counts."""
    return 2 if text == LINEAR else int(text.startswith(PATTERN))


def _matches(texts: Iterable[str], modules: Collection[str]) -> dict[str, set[str]]:
    """The modules that each target means; raises where matching could take very long."""
    found, ways = {}, 0
    for text in dict.fromkeys(texts):
        found[text] = {*modules} if _rank(text) == 2 else {text}
        if _rank(text) != 1:
            continue
        try:
            pattern, more = patterns.compile_bounded(text.removeprefix(PATTERN))
            if (ways := ways + more) > patterns.MOST_WAYS:
                raise ValueError(f"a name could match in more than {patterns.MOST_WAYS:,} ways")
        except ValueError as error:
            raise UserError(
                f"config.json: {ENTRY} has the pattern {brief(text)}, which is not matched: "
                f"{error}. Write a simpler one, or the names themselves."
            ) from None
        found[text] = {module for module in modules if pattern.match(module)}
    return found


def _group_of(scheme: Scheme) -> Json:
    """The entries of a group that describe a scheme."""
    weights = {"num_bits": 8, "type": TYPES[scheme.format], "symmetric": True}
    inputs, by = None, {"strategy": "channel", "dynamic": False}
    if scheme.activations != "none":
        strategy, is_dynamic = STRATEGIES[scheme.activations], scheme.activations == "dynamic"
        inputs = weights | {"type": TYPES[scheme.input_format]}
        inputs |= {"strategy": strategy, "dynamic": is_dynamic}
    if scheme.format == "int4":
        by |= {"num_bits": 4, "strategy": "group", "group_size": GROUP}
    return {"weights": weights | by, "input_activations": inputs, "output_activations": None}


def _scheme(name: str, group: Json) -> Scheme:
    for scheme in (Scheme(f, a) for f in TYPES for a in get_args(Activations)):
        if all(_says(group.get(entry), value) for entry, value in _group_of(scheme).items()):
            if (order := group["weights"].get("actorder")) in ("group", "dynamic"):
                raise UserError(
                    f"config.json: {ENTRY}.{name} has actorder={order!r}: its groups are not of "
                    "neighbouring inputs, which coat_jax does not support."
                )
            return scheme
    raise UserError(
        f"config.json: {ENTRY}.{name} is a scheme that coat_jax does not support. It supports "
        "symmetric weights, in 8 bits with a scale per channel or in INT4 with one for every "
        f"{GROUP} inputs; inputs that are not quantized, have one scale or a dynamic scale per "
        "token, in FP8 for INT4 weights; and outputs that are not quantized."
    )


def _says(data: Any, expected: Json | None) -> bool:
    if expected is None:
        return data is None
    return isinstance(data, Mapping) and all(data.get(k) == v for k, v in expected.items())
