"""A decoder of Llama's kind, over all the families of `Config`.

    x = embed[tokens]
    x = layer(x)                       for each layer: see coat.nn.TransformerBlock
    logits = norm(x) head

Each layer decides what it saves for the backward pass; between layers x is in `dtype`. With `remat`
x is all that is saved. Embedding and head compute in `dtype`, never in FP8.

`coat_jax.generation` runs the model token by token.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from coat_jax import nn, ops
from coat_jax.models.batches import Batch
from coat_jax.models.config import Config
from coat_jax.models.protocol import Loss
from coat_jax.nn.norm import AnyNorm
from coat_jax.nn.parameters import value_of, weight
from coat_jax.optax import Stage
from coat_jax.precision import precision_of
from coat_jax.probes import layer_probes, layer_scope, probes_of_layer
from coat_jax.validation import brief

EMBEDDING_INIT = nnx.initializers.normal(0.02)


class Llama(nnx.Module):
    """Tokens to hidden states, logits or a loss.

    Attributes:
        embed: [V, D].
        layers: a list of them; with `config.scan` one, whose parameters have a first axis over
            layers.
        norm: the norm before the head.
        head: [D, V], or None if it is tied to the embedding.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        axes, dtype = config.axes, config.param_dtype
        self.config = config
        # Never along its rows: the logits of a head that is tied to it would need all tokens.
        columns = axes.tensor, axes.fsdp
        shape = config.vocab, config.width
        self.embed = weight(rngs, shape, columns, init=EMBEDDING_INIT, dtype=dtype)
        self.layers = stack_layers(config, partial(_layer, config), rngs)
        self.norm = _norm(config)
        head = None
        if not config.tied:
            head = weight(rngs, (config.width, config.vocab), axes.widening, dtype=dtype)
        self.head = nnx.data(head)

    @property
    def decoder(self) -> "Llama":
        """The part of the model that writes text: here, all of it."""
        return self

    def __call__(
        self,
        tokens: Int[Array, "B S"],
        positions: Int[Array, "*B S"] | None = None,
        segments: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S V"]:
        """The logits of the token after each one, in FP32.

        Args:
            tokens: one outside the vocabulary gives NaN.
            positions: of the tokens, 0 .. S - 1 by default.
            segments: the number of each token's document; none sees another document.
        """
        return self.logits(self.hidden(tokens, positions, segments))

    def hidden(
        self,
        tokens: Int[Array, "B S"],
        positions: Int[Array, "*B S"] | None = None,
        segments: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """The input of the head; for the arguments see `__call__`."""
        require_tokens(self.config, tokens, positions, segments)
        return self.hidden_of(self.embed_tokens(tokens), positions, segments)

    def hidden_of(
        self,
        x: Float[Array, "B S D"],
        positions: Int[Array, "*B S"] | None = None,
        segments: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """As `hidden`, from embedded tokens."""
        return self.norm(run_layers(self.config, self.layers, x, positions, segments)[0])

    def embed_tokens(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S D"]:
        """The residual stream before the first layer."""
        x = ops.embedding(value_of(self.embed), tokens)
        return shard_batch(x.astype(self.config.dtype), self.config.batch_axes)

    def logits(self, hidden: Float[Array, "B S D"]) -> Float[Array, "B S V"]:
        """The head applied to `hidden`, in FP32."""
        head = self.head_weight().astype(hidden.dtype)
        return jnp.matmul(hidden, head, preferred_element_type=jnp.float32)

    def loss(self, batch: Batch, *, evaluate: bool = False, chunk: int = 512) -> Loss:
        """The cross-entropy of the labelled tokens, without the full logits.

        With experts the statistics have the mean penalties of all layers' routers, without their
        weights, and `expert_load`, the tokens of each expert [L, E].

        Args:
            batch: rows of text.
            evaluate: leaves out the z-loss, and the penalties of routers.
            chunk: see `coat.ops.cross_entropy`.
        """
        tokens, labels, positions, segments = batch
        require_tokens(self.config, tokens, positions, segments)
        x = self.embed_tokens(tokens)
        x, routing = run_layers(self.config, self.layers, x, positions, segments)
        loss = self.loss_of(self.norm(x), labels, evaluate=evaluate, chunk=chunk)
        return loss if routing is None else self._with_penalties(loss, routing, labels, evaluate)

    def _with_penalties(
        self, loss: Loss, routing: nn.Routing, labels: Int[Array, "B S"], evaluate: bool
    ) -> Loss:
        experts = self.config.experts
        assert experts is not None
        count_in_row = jnp.sum((labels >= 0).astype(jnp.float32), axis=-1)

        def summed(of_rows: Float[Array, "L B"]) -> Float[Array, ""]:
            return jnp.sum(jnp.mean(of_rows, axis=0) * count_in_row)

        aux, z = summed(routing.balance), summed(routing.z)
        penalty = 0.0 if evaluate else experts.aux_loss * aux + experts.z_loss * z
        sums = {"aux_loss": aux, "router_z_loss": z, "expert_load": routing.load}
        return Loss(loss.sum + penalty, loss.count, sums)

    def after_step(self, statistics: Mapping[str, Array]) -> dict[str, Array]:
        """Moves the biases of routers towards even loads; returns the imbalance before that.

        The imbalance is how many times its even share the busiest expert of all layers has.
        """
        experts = self.config.experts
        if experts is None:
            return {}
        load = statistics["expert_load"]
        even = jnp.mean(load, axis=-1, keepdims=True)
        if experts.bias_rate:
            change = experts.bias_rate * jnp.sign(even - load)
            if self.config.scan:
                self.layers.mlp.bias[...] += change
            else:
                for layer, of_layer in zip(self.layers, change, strict=True):
                    layer.mlp.bias[...] += of_layer
        return {"load_imbalance": jnp.max(load / jnp.maximum(even, 1))}

    def loss_of(
        self,
        hidden: Float[Array, "B S D"],
        labels: Int[Array, "B S"],
        *,
        evaluate: bool = False,
        chunk: int = 512,
    ) -> Loss:
        """The cross-entropy, from the input of the head; see `loss`."""
        z_loss, head = 0.0 if evaluate else self.config.z_loss, self.head_weight()
        total = ops.cross_entropy_sum(hidden, head, labels, chunk=chunk, z_loss=z_loss)
        return Loss(total, jnp.sum(labels >= 0))

    def stages(self, batch: Batch) -> tuple[list[Stage], Int[Array, ""]]:
        """The model from the embedding to the mean loss, a stage for each layer; the label count.

        The layers are a list, and parameters are constrained to their sharding, so that gradients
        are reduced to shards at once.
        """
        graph, params = nnx.split(self)
        head = "embed" if self.head is None else "head"
        steps = layer_functions(self.config, self.layers, batch.positions, batch.segments)

        def only(*names: str) -> Any:
            return lambda of_all: nnx.State({n: of_all[n] for n in names if n in of_all})

        def merge(of_stage: Any) -> Llama:
            return nnx.merge(graph, nnx.State({**params, **shard_params(of_stage)}))

        def embed(of_stage: Any, _: None) -> Array:
            return merge(of_stage).embed_tokens(batch.tokens)

        def loss(of_stage: Any, x: Array) -> Array:
            model, z_loss = merge(of_stage), self.config.z_loss
            weight = model.head_weight()
            return ops.cross_entropy(model.norm(x), weight, batch.labels, z_loss=z_loss)

        layers = [
            Stage(
                lambda params, i=i: params["layers"][i],  # type: ignore[misc]
                lambda own, x, step=step: step(x, shard_params(own), None)[0],  # type: ignore[misc]
            )
            for i, step in enumerate(steps)
        ]
        stages = [Stage(only("embed"), embed), *layers, Stage(only("norm", head), loss)]
        return stages, jnp.sum(batch.labels >= 0)

    def head_weight(self) -> Float[Array, "D V"]:
        """The weight of the head: the embedding's transpose where they are tied."""
        return value_of(self.embed).T if self.head is None else value_of(self.head)


# --- Layers ----------------------------------------------------------------------------------


def _layer(config: Config, key: Array) -> nn.TransformerBlock:
    before = config.norms == "before"
    shared: dict[str, Any] = {
        "residual": before,
        "precision": config.precision,
        "axes": config.axes,
        "param_dtype": config.param_dtype,
        "rngs": nnx.Rngs(key),
    }
    heads = {"all": (config.heads, config.kv_heads), "head": (1, 1), None: (0, 0)}[config.qk_norm]
    query_norm, key_norm = (_rms_norm(config, n * config.head_dim) if n else None for n in heads)
    attention = nn.Attention(
        config.width,
        config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        norm=_norm(config) if before else None,
        query_norm=query_norm,
        key_norm=key_norm,
        rotary=config.rotary,
        window=config.window,
        qkv_bias=config.qkv_bias,
        **shared,
    )
    shared |= {"norm": _norm(config) if before else None, "activation": config.activation}
    shared["limit"] = config.activation_limit
    mlp: nn.GatedMLP | nn.ExpertMLP
    if config.experts is None:
        mlp = nn.GatedMLP(config.width, config.ffn, **shared)
    else:
        mlp = nn.ExpertMLP(
            config.width,
            config.ffn,
            config.experts.count,
            chosen=config.experts.chosen,
            scores=config.experts.scores,
            normalized=config.experts.normalized,
            has_bias=config.experts.bias_rate > 0,
            batch_axes=config.batch_axes,
            **shared,
        )
    if before:
        return nn.TransformerBlock(attention, mlp)
    return nn.TransformerBlock(attention, mlp, attention_norm=_norm(config), mlp_norm=_norm(config))


def _norm(config: Config) -> AnyNorm:
    if config.norm == "rms":
        return _rms_norm(config, config.width)
    eps, precision = config.norm_eps, config.precision
    return nn.LayerNorm(
        config.width, epsilon=eps, use_scale=False, use_bias=False, precision=precision
    )


def _rms_norm(config: Config, columns: int) -> nn.RMSNorm:
    eps, precision = config.norm_eps, config.precision
    return nn.RMSNorm(columns, epsilon=eps, precision=precision, param_dtype=config.param_dtype)


# --- Stacks of layers, of any model ----------------------------------------------------------


def stack_layers(config: Any, layer: Callable[[Array], nn.TransformerBlock], rngs: nnx.Rngs) -> Any:
    """The layers of a stack, each made from a key: a list, or stacked by `config.scan`."""
    keys = jax.random.split(rngs.params(), config.layers)
    if config.scan:
        metadata = {nnx.PARTITION_NAME: None}
        return nnx.vmap(layer, out_axes=0, transform_metadata=metadata)(keys)
    return nnx.List([layer(key) for key in keys])


def run_layers(
    config: Any, layers: Any, x: Float[Array, "B S D"], *context: Array | None
) -> tuple[Float[Array, "B S D"], nn.Routing | None]:
    """The residual stream after all layers, and the routing of all layers if they have experts.

    `context` is their positions and segments.
    """
    probes = layer_probes("layers", config.layers)
    if config.scan:
        graph, stacked = nnx.split(layers)
        step = _layer_function(config, graph, *context)
        return lax.scan(lambda x, of_one: step(x, *of_one), x, (stacked, probes))
    found = []
    for i, (step, layer) in enumerate(
        zip(layer_functions(config, layers, *context), layers, strict=True)
    ):
        x, routing = step(x, nnx.state(layer), probes_of_layer(probes, i))
        found.append(routing)
    return x, jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *found)


# Of the residual stream, and the parameters and the probes of a layer; it returns the residual
# stream and the layer's `Routing`, None without experts.
LayerFunction = Callable[[Array, Any, Any], tuple[Array, nn.Routing | None]]


def layer_functions(config: Any, layers: Any, *context: Array | None) -> list[LayerFunction]:
    """Each layer of a list as a function."""
    steps: dict[Any, LayerFunction] = {}
    graphs = [nnx.graphdef(layer) for layer in layers]
    for graph in graphs:
        if graph not in steps:
            # Layers are alike: under jit one is traced, and serves all. XLA inlines it.
            steps[graph] = jax.jit(_layer_function(config, graph, *context))
    return [steps[graph] for graph in graphs]


def _layer_function(config: Any, graph: Any, *context: Array | None) -> LayerFunction:
    def step(x: Array, state: Any, probes: Any, *context: Array | None) -> Any:
        with layer_scope(probes):
            layer, routing = nnx.merge(graph, state), None
            if isinstance(layer, nn.TransformerBlock):
                x, routing = layer.with_routing(x, *context)
            else:
                x = layer(x, *context)
            return shard_batch(x, config.batch_axes), routing

    if config.remat == "layer":
        # In a loop XLA cannot merge a layer with its recomputation: there is nothing to prevent.
        step = jax.checkpoint(step, prevent_cse=not config.scan)
    elif config.remat == "layer_fp8":
        step = ops.recompute(step, stochastic=precision_of(config.precision).stochastic)
    return lambda x, state, probes: step(x, state, probes, *context)


def shard_batch(x: Float[Array, "B ..."], axes: tuple[str, ...]) -> Float[Array, "B ..."]:
    """`x` with its first axis sharded along these axes of the mesh that is set, if one is."""
    mesh = jax.sharding.get_abstract_mesh()
    if not axes or mesh.empty:
        return x
    # Within shard_map an axis is manual: the batch is sharded along it already.
    automatic = tuple(a for a in axes if a not in (*mesh.manual_axes, *mesh.explicit_axes))
    if not automatic:
        return x
    spec = PartitionSpec(automatic)
    NamedSharding(mesh, spec).shard_shape(x.shape)  # raises if it does not divide: jit would pad
    return lax.with_sharding_constraint(x, spec)


def shard_params(params: Any) -> Any:
    """`params`, or their gradients, constrained to their sharding on the mesh that is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return params
    return lax.with_sharding_constraint(params, nnx.get_partition_spec(params))


def require_tokens(
    config: Config, tokens: Any, positions: Array | None = None, segments: Array | None = None
) -> None:
    """Raises unless a model of this config can read what `Llama.__call__` takes."""
    given = {"tokens": tokens, "positions": positions, "segments": segments}
    arrays = {name: array for name, array in given.items() if array is not None}
    for name, array in arrays.items():
        if not jnp.issubdtype(getattr(array, "dtype", jnp.float32), jnp.integer):
            raise TypeError(
                f"{name} are an array of whole numbers, not {brief(array)}: pass "
                f"jnp.asarray({name}, jnp.int32)."
            )
    if tokens.ndim != 2:
        raise ValueError(
            f"tokens are [batch, sequence], not of shape {tokens.shape}."
            f"{' Add a batch axis: tokens[None].' if tokens.ndim == 1 else ''}"
        )
    if tokens.shape[1] > config.context:
        raise ValueError(
            f"A sequence of {tokens.shape[1]} tokens is longer than context={config.context}. "
            "Truncate it, or replace `context` in the model's Config."
        )
    for name, array in arrays.items():
        allowed = [tokens.shape, tokens.shape[1:]] if name == "positions" else [tokens.shape]
        if array.shape not in allowed:
            shapes = " or ".join(map(str, allowed))
            raise ValueError(
                f"{name} of shape {array.shape} came with tokens of shape {tokens.shape}: they "
                f"should be {shapes}."
            )
