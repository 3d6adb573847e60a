"""What cannot work is refused with what arrived and what is required."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import ops
from coat_jax.numerics.cache_formats import StoredHeads


def ones(*shape, dtype=np.float32):
    """Of NumPy: JAX compiles a program for each shape, and for each slice."""
    return np.ones(shape, dtype)


X = ones(2, 5, 13)
W = ones(13, 29)
DOWN = ones(29, 13)
HEADS = ones(2, 5, 4, 8)
PAST = ones(1, 2, 4, 5, 8)
NORM = ops.Norm()
WIDE_NORM = ops.Norm(ones(14))
INTEGERS = ones(2, 5, 13, dtype=np.int32)
LABELS = np.zeros((2, 5), np.int32)
PLACES = np.arange(5)
FP8 = coat.E4M3
SWAPPED = coat.Precision(forward=coat.E5M2, backward=FP8)
THIN = (ones(13, 8),) * 3
FROZEN = ops.Frozen(W.astype(FP8), np.float32(1))
ADAPTER = W[:, :4], ones(4, 29)
QUANTIZED = ops.Quantized(W.T.astype(np.int8), ones(29))
ONE_AXIS = (((2,), (0,)), ((), ()))

linear = partial(partial, ops.linear)
norm_linear = partial(partial, ops.norm_linear)
rotate = partial(partial, ops.rotate)
freeze = partial(partial, ops.freeze)
embedding = partial(partial, ops.embedding)
quantized = partial(partial, ops.quantized_linear)
quantize = partial(partial, ops.quantize_weight)
dot_general = partial(partial, ops.DotGeneral())
einsum = partial(partial, ops.Einsum())


def gated_mlp(x=X, norm=NORM, gate=W, up=W, down=DOWN, **settings):
    return partial(ops.gated_mlp, x, norm, gate, up, down, **settings)


def mlp(x=X, norm=NORM, up=W, down=DOWN, *biases, **settings):
    return partial(ops.mlp, x, norm, up, down, *biases, **settings)


def attention(q=HEADS, k=HEADS, v=HEADS, **settings):
    return partial(ops.attention, q, k, v, **settings)


def attention_linear(w, *bias, q=HEADS, **settings):
    return partial(ops.attention_linear, q, HEADS, HEADS, w, *bias, **settings)


def to_past(q=HEADS[:, :1], past=PAST, new=PAST[0, ..., :1, :], first=PLACES[:2], **settings):
    past, new = (ops.Past(*[StoredHeads(x)] * 2) for x in (past, new))
    return partial(ops.attention_to_past, q, new, ops.Visible(past, 0, first, 3), **settings)


def norm_qkv(x=X, norm=NORM, weights=THIN, head_dim=8, **settings):
    return partial(ops.norm_qkv, x, norm, weights, head_dim=head_dim, **settings)


def cross_entropy(hidden=X, w=W, labels=LABELS, **settings):
    return partial(ops.cross_entropy, hidden, w, labels, **settings)


def adapted(x=X, frozen=FROZEN, adapter=ADAPTER, *bias, **settings):
    return partial(ops.adapted_linear, x, frozen, adapter, *bias, **settings)


def of_traced(op, **settings):
    """The op, with the settings as arguments of a program."""
    return lambda: jax.jit(lambda settings: op(**settings)())(settings)


VALUES = [
    # Layers.
    (linear(X, W.T), r"linear got .* 13 columns and a weight of shape \(29, 13\).*\[13, N\]"),
    (linear(X, [W, W[:12]]), r"13 columns.*\(12, 29\)"),
    (linear(X, W, precision="bf16", implementation="triton"), "this precision has fp8_linear=F"),
    (linear(X, W, ones(13)), r"bias of shape \(13,\) for .* \(13, 29\): it should be \(29,\)"),
    (linear(X, [W, W], ones(29)), "linear takes one bias per weight, None for a layer without"),
    (linear(X[0, 0, 0], W), "linear works on the last axis of its input, and a scalar has none"),
    (norm_linear(X, WIDE_NORM, W), r"13 columns and a norm .*\(14,\): it should be \(13,\)"),
    (norm_linear(X, ops.Norm(shift=ones(1, 13), kind="layer"), W), r"\(1, 13\): it should be"),
    (norm_linear(X, NORM, W.T), r"norm_linear got .*\(29, 13\)"),
    (partial(ops.norm, X, WIDE_NORM), r"norm got an input with 13 .*\(14,\)"),
    (partial(ops.Norm, kind="batch"), r"kind='batch' must be one of \('rms', 'layer'\)"),
    (partial(ops.Norm, shift=ones(13)), 'kind "rms" has no shift. Use kind="layer"'),
    (partial(ops.Norm, eps=float("nan")), "eps=nan must be at least 0"),
    # MLPs.
    (gated_mlp(up=W[:, :28]), r"gate \(13, 29\) and up \(13, 28\) must have one shape"),
    (gated_mlp(gate=W.T, up=W.T), r"gated_mlp got .* 13 columns .*\(29, 13\)"),
    (gated_mlp(down=DOWN[:, :12]), r"gated_mlp got x with 13 columns and down \(29, 12\)"),
    (gated_mlp(norm=WIDE_NORM), r"gated_mlp got .*\(14,\)"),
    (gated_mlp(activation="SiLU"), r"'SiLU' must be one of \('silu', 'gelu', 'gelu_tanh', 'quick"),
    (gated_mlp(limit=0.0), "limit=0.0 must be a finite number above 0, or None for no limit"),
    (gated_mlp(limit=float("nan")), "limit=nan must be a finite number above 0"),
    (gated_mlp(limit=float("inf")), "limit=inf must be a finite number above 0"),
    (mlp(X, NORM, W, DOWN, None, ones(29)), r"bias of shape \(29,\).*\(13,\)"),
    (partial(ops.activate, X, X[:1]), r"activate got gate float32\[2, 5, 13\] and up"),
    (partial(ops.activate, X, activation="mish"), "activation='mish' must be one of"),
    # Attention.
    (attention(q=HEADS[0]), r"q \[B, S, N, H\] .*not \(5, 4, 8\), \(2, 5,"),
    (attention(v=HEADS[:, :4]), r"and \(2, 4, 4, 8\)"),
    (attention(q=HEADS[:1]), r"not \(1, 5, 4, 8\), \(2, 5, 4, 8\)"),
    (attention(k=HEADS[:, :, :3], v=HEADS[:, :, :3]), "where K divides N"),
    (attention(*[HEADS[..., :0]] * 3), "H is not 0"),
    (attention(window=0), "window=0 needs causal=True and at least one"),
    (attention(window=3, causal=False), "window=3 needs causal=True"),
    (attention(segments=LABELS[:, :4]), r"segments \(2, 4\) must number the tokens of q \(2, 5\)"),
    (attention(k=HEADS[:, :4], v=HEADS[:, :4], segments=LABELS), "tokens of q .* and of k"),
    (attention(scale=float("nan")), "scale=nan must be finite"),
    (attention(backend="triton"), 'backend=\'triton\' must be None, "cudnn" or "xla"'),
    (attention(*[ones(2, 5, 4, 136)] * 3, backend="cudnn"), 'not 136. Use backend="xla"'),
    (attention(*[ones(2, 5, 4, 12)] * 3, backend="cudnn"), "a multiple of 8, not 12"),
    (attention_linear(ones(8, 29)), r"attention_linear got an input with 32 columns .*\(8, 29\)"),
    (attention_linear(ones(32, 29), ones(32)), r"bias of shape \(32,\).*should be \(29,\)"),
    *(
        (to_past(**wrong), r"past takes q \[B, 1, N, H\], a past with codes \[L, B, K, T, H\], new")
        for wrong in (
            {"q": HEADS[0, :1]},
            {"q": HEADS[:, :2]},
            {"q": HEADS[:, :1, :3]},
            {"q": HEADS[:1, :1]},
            {"past": PAST[0]},
            {"past": PAST[..., :4]},
            {"new": PAST[0]},
            {"first": PLACES[:3]},
        )
    ),
    (to_past(past=PAST.astype(np.float16)), "that are stored in one format, not .*float16"),
    (to_past(scale=float("inf")), "scale=inf must be finite"),
    (to_past(implementation="cuda"), 'implementation must be None, "xla" or "triton"'),
    (norm_qkv(head_dim=0), "whole heads of head_dim=0"),
    (norm_qkv(head_dim=7), r"three weights to whole heads of head_dim=7, not \[\(13, 8\)"),
    (norm_qkv(weights=THIN[:2]), "three weights to whole heads of head_dim=8"),
    (norm_qkv(x=X[0]), r"x \[batch, sequence, width\], not \(5, 13\)"),
    (norm_qkv(rotary=ops.Rotary(), positions=PLACES[:4]), r"\(4,\) must be one per token: \(5,\)"),
    (norm_qkv(rotary=ops.Rotary(), head_dim=1), "a head of 1 is odd"),
    (rotate(HEADS[0, 0], PLACES[:4], ops.Rotary()), r"x \[\*B, S, N, H\], not \(4, 8\)"),
    (rotate(HEADS[..., :7], PLACES, ops.Rotary()), "rotate pairs: a head of 7 is odd"),
    # The loss, and tokens.
    (cross_entropy(labels=LABELS[:1]), r"labels \(1, 5\) must be one per row of hidden \(2, 5\)"),
    (cross_entropy(hidden=X[0, 0], labels=LABELS[0, 0]), r"labels \(\) .* needs a sequence axis"),
    (cross_entropy(w=W.T), r"cross_entropy got .*13 columns .*\(29, 13\)"),
    (cross_entropy(chunk=0), "chunk=0 must be a positive whole"),
    (cross_entropy(chunk=1.5), "chunk=1.5 must be a positive whole"),
    (cross_entropy(label_smoothing=1.0), "label_smoothing=1.0 at least 0 and under 1"),
    (cross_entropy(z_loss=-1.0), "z_loss=-1.0 must be at least"),
    (embedding(W[:0], LABELS), r"a table \[V, D\] of at least one row, not \(0, 29\)"),
    (embedding(W[0], LABELS), r"a table \[V, D\] of at least one row, not \(29,\)"),
    # Products of other forms.
    (dot_general(X, X, (((2,), (2,)), ((0,), (0,)))), r"without batch axes, and got \(0,\), \(0,"),
    (einsum("bsd,bdf->bsf", X, ones(2, 13, 5)), "axes that input, weight and output share"),
    (einsum("bsd,df->bf", X, W), "sums over an axis of one operand alone"),
    (einsum("bsd,df", X, W), "'bsd,df' names no output"),
    (einsum("bsd,df->bsf", X[0], W), r"name each axis of an input \(5, 13\) and of a weight \(13,"),
    (einsum("bsd,dd->bs", X, W), "does not name each axis .* once"),
    (partial(ops.DotGeneral, "fp9"), "no precision 'fp9'"),
    # Frozen and quantized weights.
    (freeze(W[0]), r"freeze rounds one weight \[K, N\], not an array of shape \(29,\)"),
    (freeze(W, precision=coat.COAT_INT8), "freeze takes a precision that .* such as coat.COAT"),
    *(
        (adapted(precision=precision), "adapted_linear takes a precision that multiplies in FP8")
        for precision in (coat.BF16, coat.COAT_INT8, coat.Precision(forward="E3M4"))
    ),
    (adapted(adapter=(W[:, :4], ones(4, 28))), r"adapter with 28 outputs and .* \(13, 29\)"),
    (adapted(frozen=ops.Frozen(W[:12], 1)), r"13 columns, .* frozen weight of shape \(12, 29\)"),
    (adapted(X, FROZEN, ADAPTER, ones(3)), r"bias of shape \(3,\) .* it should be \(29,\)"),
    (adapted(precision=SWAPPED), "float8_e4m3fn, but .* multiplies in E5M2"),
    (quantize(W[0]), r"a weight \[K, N\]"),
    (quantize(W, "int3"), "one of int8, fp8, int4"),
    (quantize(W, fit="best"), "fit='best' must be 'max' or"),
    (quantized(X[..., 1:], QUANTIZED), "with 12 columns"),
    (quantized(X, QUANTIZED, activations="static"), "needs a weight with an input_scale"),
    (quantized(X, QUANTIZED, activations="some"), "one of none, static, dynamic"),
    (quantized(X, QUANTIZED, ones(1)), r"a bias of shape \(1,\): it should be"),
    (quantized(X, ops.Quantized(W.T, ones(29))), "must be int8 or float8_e4m3fn"),
    *(
        (partial(ops.recompute, jnp.tanh, block=block), "block=.* a whole number among 16, 32")
        for block in (0, "16", None, True)
    ),
    # Kernels.
    (
        linear(X, W, precision=coat.Precision(forward="E3M4"), implementation="triton"),
        r"E4M3 and E5M2.*forward=E3M4, backward=E5M2.*XLA",
    ),
]


REAL = "computes with real floats, not with"
NUMBER = "must be a Python number"
TYPES = [
    (linear(INTEGERS, W), f"linear {REAL} int32"),
    (norm_linear(INTEGERS, NORM, W), f"norm_linear {REAL} int32"),
    (partial(ops.norm, INTEGERS, NORM), f"norm {REAL} int32"),
    (partial(ops.norm, X, ops.Norm(INTEGERS[0, 0])), f"norm {REAL} int32"),
    (gated_mlp(x=INTEGERS), f"gated_mlp {REAL} int32"),
    (mlp(X, NORM, W, DOWN, ones(29, dtype=bool)), f"mlp {REAL} bool"),
    (attention(k=HEADS.astype(np.complex64)), f"attention {REAL} complex64"),
    (attention_linear(ones(32, 29, dtype=np.int8)), f"attention_linear {REAL} int8"),
    (norm_qkv(x=INTEGERS), f"norm_qkv {REAL} int32"),
    (rotate(HEADS.astype(np.int32), PLACES, ops.Rotary()), f"rotate {REAL} int32"),
    (cross_entropy(w=W.astype(np.int32)), f"cross_entropy {REAL} int32"),
    (embedding(W.astype(np.int32), LABELS), f"embedding {REAL} int32"),
    (partial(ops.recompute(jnp.tanh), INTEGERS), f"recompute {REAL} int32"),
    (partial(ops.recompute, X), "recompute takes a function, not ndarray"),
    # Results would be in FP8, too, where large numbers are NaN.
    *(
        (call, r"rounds to FP8 itself.*got float8.* Pass BF16 or FP32")
        for call in (
            linear(X.astype(FP8), W),
            attention(k=HEADS.astype(FP8)),
            embedding(W.astype(FP8), LABELS),
            freeze(W.astype(FP8)),
        )
    ),
    *(
        (call, r"takes arrays, not (list|float|NoneType)")
        for call in (
            linear([[1.0]], W),
            linear(X, None),
            linear(X, W, [ones(29)]),
            norm_qkv(x=None),
            attention(q=None),
            rotate(None, PLACES, ops.Rotary()),
            embedding(None, LABELS),
            cross_entropy(hidden=None),
            freeze(None),
            quantize(None),
            to_past(q=None),
            dot_general([[1.0]], W, ONE_AXIS),
            einsum("bd,df->bf", X[0], None),
            mlp(up=None),
        )
    ),
    # Norms, angles, windows and adapters of another type.
    (norm_linear(X, ones(13), W), r"pass coat\.ops\.Norm\(scale\)"),
    (gated_mlp(norm=coat.nn.RMSNorm(13)), r"not RMSNorm: pass its as_op_norm\(\)"),
    (norm_qkv(norm=None), "norm_qkv takes a coat.ops.Norm, not NoneType"),
    (norm_qkv(rotary=10000), "rotary=10000 must be a coat.ops.Rotary"),
    (attention(window=2.5), "window=2.5 must be a whole number"),
    (adapted(frozen=W), "takes a weight from coat.ops.freeze"),
    (adapted(adapter=W), "adapter of two arrays"),
    (quantized(X, W), "a weight from coat.ops.quantize_weight"),
    (attention(scale=jax.device_put(ones(4))), f"scale=.* {NUMBER}"),
    (of_traced(attention, scale=0.1), f"scale=.* {NUMBER}"),
    (of_traced(cross_entropy, z_loss=0.1), f"z_loss=.* {NUMBER}"),
    # Tokens, and what else has one number or flag per token.
    (cross_entropy(labels=LABELS.astype(np.float32)), "labels must be .* numbers, not float32"),
    (cross_entropy(labels=[[0] * 5] * 2), "labels must be an array of whole numbers, not list"),
    (embedding(W, np.float32(LABELS)), "tokens must be an array of whole numbers, not float32"),
    (embedding(W, 1), "tokens must be an array of whole numbers, not int"),
    *(
        (call, r"type '<class '(list|NoneType)'>' is not a valid JAX type")
        for call in (
            attention(segments=[[0] * 5] * 2),
            rotate(HEADS, [0] * 5, ops.Rotary()),
        )
    ),
]


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (error, *case)
        for error, cases in ((ValueError, VALUES), (TypeError, TYPES))
        for case in cases
    ],
)
def test_what_cannot_work_is_refused(error, call, message):
    with pytest.raises(error, match=message):
        call()


LEAN_INT8 = dataclasses.replace(coat.COAT_LEAN, forward_products="int8")
ONCE = {
    "linear": lambda x, p: ops.linear(x, W, precision=p),
    "norm_linear": lambda x, p: ops.norm_linear(x, NORM, W, precision=p),
    "norm": lambda x, p: ops.norm(x, NORM, precision=p),
    "gated_mlp": lambda x, p: ops.gated_mlp(x, NORM, W, W, DOWN, precision=p),
    "mlp": lambda x, p: ops.mlp(x, NORM, W, DOWN, precision=p),
    "attention": lambda x, p: ops.attention(*[x[:, :, None]] * 3, precision=p),
    "attention_linear": lambda x, p: ops.attention_linear(*[x[:, :, None]] * 3, W, precision=p),
}


@pytest.mark.parametrize("name", ONCE)
def test_second_derivatives_of_fp8_are_refused(name):
    """Forward over reverse, and reverse over reverse, in any direction of any kind of program."""
    message = rf"{name} in FP8 can be differentiated once only.*precision=coat\.BF16"

    def loss(x, precision):
        return jnp.sum(ONCE[name](x, precision) ** 2)

    def length(x, precision):
        return jnp.sum(jax.grad(loss)(x, precision) ** 2)

    in_a_program = jax.jit(jax.grad(length), static_argnums=1)
    for twice, precision in (
        (jax.hessian(loss), coat.COAT_LEAN),
        (jax.grad(length), LEAN_INT8),
        (in_a_program, coat.COAT_LEAN),
    ):
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(lambda x, f=twice, p=precision: f(x, p), X)
