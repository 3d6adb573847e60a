"""What cannot work is refused with what arrived and what is required."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import ops


def ones(*shape, dtype=np.float32):
    """Of NumPy: JAX compiles a program for each shape, and for each slice."""
    return np.ones(shape, dtype)


X = ones(2, 5, 13)
W = ones(13, 29)
DOWN = ones(29, 13)
HEADS = ones(2, 5, 4, 8)
NORM = ops.Norm()
WIDE_NORM = ops.Norm(ones(14))
INTEGERS = ones(2, 5, 13, dtype=np.int32)
LABELS = np.zeros((2, 5), np.int32)


def linear(*args, **settings):
    return lambda: ops.linear(*args, **settings)


def norm_linear(*args, **settings):
    return lambda: ops.norm_linear(*args, **settings)


def gated_mlp(x=X, norm=NORM, gate=W, up=W, down=DOWN, **settings):
    return lambda: ops.gated_mlp(x, norm, gate, up, down, **settings)


def mlp(x=X, norm=NORM, up=W, down=DOWN, *biases, **settings):
    return lambda: ops.mlp(x, norm, up, down, *biases, **settings)


def attention(q=HEADS, k=HEADS, v=HEADS, **settings):
    return lambda: ops.attention(q, k, v, **settings)


def attention_linear(w, *bias, q=HEADS, **settings):
    return lambda: ops.attention_linear(q, HEADS, HEADS, w, *bias, **settings)


def norm_qkv(x=X, norm=NORM, **settings):
    return lambda: ops.norm_qkv(x, norm, (ones(13, 8),) * 3, **settings)


def cross_entropy(hidden=X, w=W, labels=LABELS, **settings):
    return lambda: ops.cross_entropy(hidden, w, labels, **settings)


VALUES = {
    "linear: transposed weight": (
        linear(X, W.T),
        r"linear got an input with 13 columns and a weight of shape \(29, 13\).*\[13, N\]",
    ),
    "linear: weight of rank 3": (linear(X, W[None]), r"shape \(1, 13, 29\)\. A weight is"),
    "linear: second weight": (linear(X, [W, W[:12]]), r"13 columns.*\(12, 29\)"),
    "linear: a kernel for products not in FP8": (
        linear(X, W, precision="bf16", implementation="triton"),
        "kernels for products in FP8, but this precision has fp8_linear=False",
    ),
    "linear: no weight": (linear(X, []), "linear needs at least one weight"),
    "linear: bias": (
        linear(X, W, ones(13)),
        r"bias of shape \(13,\) for a weight of shape \(13, 29\): it should be \(29,\)",
    ),
    "linear: one bias for two weights": (
        linear(X, [W, W], ones(29)),
        "2 weights came with 1 biases. Give one per weight, None for",
    ),
    "linear: three biases for two weights": (
        linear(X, (W, W), [None] * 3),
        "2 weights came with 3 biases",
    ),
    "norm_linear: norm": (
        norm_linear(X, WIDE_NORM, W),
        r"norm_linear got an input with 13 columns and a norm .*\(14,\): it should be \(13,\)",
    ),
    "norm_linear: shift": (
        norm_linear(X, ops.Norm(shift=ones(1, 13), kind="layer"), W),
        r"\(1, 13\): it should be \(13,\)",
    ),
    "norm_linear: weight": (norm_linear(X, NORM, W.T), r"norm_linear got .*\(29, 13\)"),
    "norm: width": (lambda: ops.norm(X, WIDE_NORM), r"norm got an input with 13 .*\(14,\)"),
    "norm: kind": (
        lambda: ops.Norm(kind="batch"),
        r"kind='batch' must be one of \('rms', 'layer'\)",
    ),
    "norm: shift of rms": (
        lambda: ops.Norm(shift=ones(13)),
        'kind "rms" has no shift. Use kind="layer"',
    ),
    "gated_mlp: gate and up": (
        gated_mlp(up=W[:, :28]),
        r"gate \(13, 29\) and up \(13, 28\) must have one shape",
    ),
    "gated_mlp: both": (gated_mlp(gate=W.T, up=W.T), r"gated_mlp got .* 13 columns .*\(29, 13\)"),
    "gated_mlp: down": (gated_mlp(down=W), r"29 columns and a weight of shape \(13, 29\)"),
    "gated_mlp: width of down": (
        gated_mlp(down=DOWN[:, :12]),
        r"gated_mlp got x with 13 columns and down \(29, 12\)",
    ),
    "gated_mlp: norm": (gated_mlp(norm=WIDE_NORM), r"gated_mlp got .*\(14,\)"),
    "gated_mlp: activation": (
        gated_mlp(activation="swish"),
        r"activation='swish' must be one of \('silu', 'gelu', 'gelu_tanh', 'relu', 'relu2'\)",
    ),
    "mlp: activation": (mlp(activation=None), r"activation=None must be one of"),
    "mlp: up": (mlp(up=DOWN), r"mlp got an input with 13 columns .*\(29, 13\)"),
    "mlp: width of down": (
        mlp(down=DOWN[:, :1], residual=False),
        r"mlp got x with 13 columns and down \(29, 1\)",
    ),
    "mlp: up_bias": (mlp(X, NORM, W, DOWN, ones(13)), r"bias of shape \(13,\).*\(29,\)"),
    "mlp: down_bias": (
        mlp(X, NORM, W, DOWN, None, ones(29)),
        r"bias of shape \(29,\).*\(13,\)",
    ),
    "attention: rank": (attention(q=HEADS[0]), r"q \[B, S, N, H\] .*not \(5, 4, 8\), \(2, 5,"),
    "attention: k and v": (attention(v=HEADS[:, :4]), r"and \(2, 4, 4, 8\)"),
    "attention: batch": (
        attention(q=HEADS[:1]),
        r"q \(1, 5, 4, 8\) and k \(2, 5, 4, 8\) do not fit: batch and head sizes must be equal",
    ),
    "attention: head size": (attention(q=HEADS[..., :6]), r"q \(2, 5, 4, 6\) and k .*do not fit"),
    "attention: key heads": (
        attention(k=HEADS[:, :, :3], v=HEADS[:, :, :3]),
        "number of key heads must divide that of query heads",
    ),
    "attention: window of 0": (attention(window=0), "window=0 needs causal=True and at least one"),
    "attention: full window": (attention(window=3, causal=False), "window=3 needs causal=True"),
    "attention: segments": (
        attention(segments=np.zeros((2, 4), np.int32)),
        r"segments \(2, 4\) must number the tokens of q \(2, 5\)",
    ),
    "attention: segments of other keys": (
        attention(k=HEADS[:, :4], v=HEADS[:, :4], segments=LABELS),
        "must number the tokens of q .* and of k",
    ),
    "attention: backend": (
        attention(backend="triton"),
        'backend=\'triton\' must be None, "cudnn" or "xla"',
    ),
    "attention: large heads on cuDNN": (
        attention(*[ones(2, 5, 4, 136)] * 3, backend="cudnn"),
        'up to 128 numbers, a multiple of 8, not 136. Use backend="xla"',
    ),
    "attention: odd heads on cuDNN": (
        attention(*[ones(2, 5, 4, 12)] * 3, backend="cudnn"),
        'a multiple of 8, not 12. Use backend="xla"',
    ),
    "attention_linear: weight": (
        attention_linear(ones(8, 29)),
        r"attention_linear got an input with 32 columns and a weight of shape \(8, 29\)",
    ),
    "attention_linear: bias": (
        attention_linear(ones(32, 29), ones(32)),
        r"bias of shape \(32,\).*should be \(29,\)",
    ),
    "attention_linear: heads": (
        attention_linear(ones(24, 29), q=HEADS[:, :, :3]),
        "do not fit",
    ),
    "attention: heads of nothing": (attention(*[HEADS[..., :0]] * 3), "at least one number"),
    "norm_qkv: heads of nothing": (norm_qkv(head_dim=0), "whole heads of head_dim=0"),
    "norm_qkv: heads of half a number": (norm_qkv(head_dim=0.5), "whole heads of head_dim=0.5"),
    "linear: a list of biases for one weight": (
        linear(X, W, [ones(29)]),
        "One weight came with a list of 1 biases",
    ),
    "adapted_linear: outputs of the adapter": (
        lambda: ops.adapted_linear(X, ops.freeze(W), (W[:, :4], ones(4, 28))),
        "adapter with 28 outputs for a weight with 29",
    ),
    "adapted_linear: frozen weight": (
        lambda: ops.adapted_linear(X, ops.freeze(W[:12]), (W[:, :4], ones(4, 29))),
        r"13 columns and a frozen weight of shape \(12, 29\): it should be \[13, N\]",
    ),
    "rotate: rank": (
        lambda: ops.rotate(HEADS[0, 0], np.arange(4), ops.Rotary()),
        r"rotate takes x \[\*B, S, N, H\], not \(4, 8\)",
    ),
    "cross_entropy: negative z_loss": (cross_entropy(z_loss=-1.0), "z_loss=-1.0 must be at least"),
    "rotate: odd heads": (
        lambda: ops.rotate(HEADS[..., :7], np.arange(5), ops.Rotary()),
        "rotate pairs: a head of 7 is odd",
    ),
    "cross_entropy: labels": (
        cross_entropy(labels=LABELS[:1]),
        r"labels \(1, 5\) must be one per row of hidden \(2, 5\)",
    ),
    "cross_entropy: no sequence": (
        cross_entropy(hidden=X[0, 0], labels=LABELS[0, 0]),
        r"labels \(\) .* needs a sequence axis",
    ),
    "cross_entropy: head": (cross_entropy(w=W.T), r"cross_entropy got .*13 columns .*\(29, 13\)"),
    "cross_entropy: chunk of 0": (cross_entropy(chunk=0), "chunk=0 must be a positive whole"),
    "cross_entropy: chunk of 1.5": (cross_entropy(chunk=1.5), "chunk=1.5 must be a positive whole"),
    "cross_entropy: smoothing of 1": (
        cross_entropy(label_smoothing=1.0),
        "label_smoothing=1.0 must be at least 0 and under 1",
    ),
    "cross_entropy: negative smoothing": (
        cross_entropy(label_smoothing=-0.1),
        "label_smoothing=-0.1 must be at least 0",
    ),
    "attention: no scale": (attention(scale=float("nan")), "scale=nan must be finite"),
    "norm: negative eps": (lambda: ops.Norm(eps=-1e-6), "eps=-1e-06 must be at least 0"),
    "norm: no eps": (lambda: ops.Norm(eps=float("nan")), "eps=nan must be at least 0"),
    "sharpness: labels": (
        lambda: ops.sharpness(X, LABELS[:1]),
        r"shape \(2, 5, 13\) came with labels of shape \(1, 5\)",
    ),
    "cross_entropy: no smoothing": (cross_entropy(label_smoothing=float("nan")), "=nan must be"),
    "cross_entropy: one number": (
        cross_entropy(hidden=X[0, 0, 0], labels=LABELS[0, 0]),
        "last axis of its input, and a scalar has none",
    ),
    "embedding: no rows": (
        lambda: ops.embedding(W[:0], LABELS),
        r"at least one row, not \(0, 29\)",
    ),
    "attention_to_past: rank": (
        lambda: ops.attention_to_past(HEADS[0, :1], HEADS, HEADS, LABELS == 0),
        r"attention_to_past takes q \[B, 1, N, H\].* not \(1, 4, 8\), \(2, 5, 4, 8\)",
    ),
    "DotGeneral: sizes": (
        lambda: ops.DotGeneral()(X, W, (((2,), (1,)), ((), ()))),
        r"\(2, 5, 13\) and a weight \(13, 29\) do not fit: their axes \(2,\) and \(1,\)",
    ),
    "DotGeneral: no such axis": (
        lambda: ops.DotGeneral()(X, W, (((3,), (0,)), ((), ()))),
        r"do not fit: their axes \(3,\) and \(0,\)",
    ),
    "Einsum: rank": (
        lambda: ops.Einsum()("bsd,df->bsf", X[0], W),
        r"does not name each axis of an input \(5, 13\) and of a weight \(13, 29\) once",
    ),
    "Einsum: a diagonal": (
        lambda: ops.Einsum()("bsd,dd->bs", X, W),
        "does not name each axis .* once",
    ),
    "Einsum: three operands": (
        lambda: ops.Einsum()("bsd,df,fg->bsg", X, W),
        "does not name each axis .* once",
    ),
}


@pytest.mark.parametrize("case", VALUES)
def test_wrong_values_are_refused(case):
    call, message = VALUES[case]
    with pytest.raises(ValueError, match=message):
        call()


TYPES = {
    "linear": (linear(INTEGERS, W), "int32"),
    "norm_linear": (norm_linear(INTEGERS, NORM, W), "int32"),
    "norm": (lambda: ops.norm(INTEGERS, NORM), "int32"),
    "gated_mlp": (gated_mlp(x=INTEGERS), "int32"),
    "mlp": (mlp(X, NORM, W, DOWN, ones(29, dtype=bool)), "bool"),
    "attention": (attention(k=HEADS.astype(np.complex64)), "complex64"),
    "attention_linear": (attention_linear(ones(32, 29, dtype=np.int8)), "int8"),
    "integers as weights: gated_mlp": (
        gated_mlp(gate=W.astype(np.int32), up=W.astype(np.int32)),
        "int32",
    ),
    "sharpness": (lambda: ops.sharpness(INTEGERS, LABELS), "int32"),
    "a norm of integers: norm": (lambda: ops.norm(X, ops.Norm(INTEGERS[0, 0])), "int32"),
    "cross_entropy": (cross_entropy(w=W.astype(np.int32)), "int32"),
}


@pytest.mark.parametrize("name", TYPES)
def test_only_real_floats_are_computed_with(name):
    call, dtype = TYPES[name]
    with pytest.raises(
        TypeError, match=f"{name.split(': ')[-1]} computes with real floats, not with {dtype}"
    ):
        call()


@pytest.mark.parametrize(
    "call",
    [
        linear(X.astype(coat.E4M3), W),
        linear(X, W.astype(coat.E5M2)),
        attention(k=HEADS.astype(coat.E4M3)),
        lambda: ops.embedding(W.astype(coat.E4M3), LABELS),
        lambda: ops.freeze(W.astype(coat.E4M3)),
    ],
)
def test_numbers_in_fp8_are_refused(call):
    """Their results would be in FP8, too, where large ones are NaN."""
    with pytest.raises(TypeError, match=r"rounds to FP8 itself.*got float8.* Pass BF16 or FP32"):
        call()


NO_ARRAYS = {
    "input": linear([[1.0]], W),
    "no input": linear(None, W),
    "no residual stream": norm_qkv(x=None, head_dim=8),
    "no heads": attention(q=None),
    "no heads to rotate": lambda: ops.rotate(None, LABELS[0], ops.Rotary()),
    "no table": lambda: ops.embedding(None, LABELS),
    "no hidden states": cross_entropy(hidden=None),
    "no weight to freeze": lambda: ops.freeze(None),
    "no weight to quantize": lambda: ops.quantize_weight(None),
    "no past": lambda: ops.attention_to_past(HEADS[:, :1], None, HEADS, LABELS == 0),
    "no slots": lambda: ops.attention_to_past(HEADS[:, :1], HEADS, HEADS, None),
    "operands of a product": lambda: ops.DotGeneral()([[1.0]], W, (((1,), (0,)), ((), ()))),
    "operands of an equation": lambda: ops.Einsum()("bd,df->bf", X[0], None),
    "weight": linear(X, [[1.0]]),
    "no weight": linear(X, None),
    "no up": mlp(up=None),
    "no gate": gated_mlp(gate=None),
    "logits": lambda: ops.sharpness([[1.0]], LABELS),
    "labels of logits": lambda: ops.sharpness(X, [[0] * 5] * 2),
    "labels": cross_entropy(labels=[[0] * 5] * 2),
    "tokens": lambda: ops.embedding(W, [1, 2]),
    "segments": attention(segments=[[0] * 5] * 2),
    "positions": lambda: ops.rotate(HEADS, [0] * 5, ops.Rotary()),
}


@pytest.mark.parametrize("name", NO_ARRAYS)
def test_lists_are_no_arrays(name):
    with pytest.raises(TypeError, match=r"takes arrays, not (list|float|NoneType)"):
        NO_ARRAYS[name]()


OTHER_TYPES = {
    "the parameter of a norm": (norm_linear(X, ones(13), W), r"pass coat\.ops\.Norm\(scale\)"),
    "a module": (gated_mlp(norm=coat.nn.RMSNorm(13)), r"not RMSNorm: pass its spec\(\)"),
    "no norm": (norm_qkv(norm=None, head_dim=8), "norm_qkv takes a coat.ops.Norm, not NoneType"),
    "theta": (norm_qkv(head_dim=8, rotary=10000), "rotary=10000 must be a coat.ops.Rotary"),
    "integers to rotate": (
        lambda: ops.rotate(HEADS.astype(np.int32), np.arange(5), ops.Rotary()),
        "rotate computes with real floats, not with int32",
    ),
    "half a window": (attention(window=2.5), "window=2.5 must be a whole number"),
    "a window or not": (attention(window=True), "window=True must be a whole number"),
    "a weight as it is": (lambda: ops.adapted_linear(X, W, (W, W)), "takes a weight from coat.ops"),
    "half an adapter": (lambda: ops.adapted_linear(X, ops.freeze(W), W), "adapter of two arrays"),
    "a weight not in 8 bits": (lambda: ops.quantized_linear(X, W), "a weight from coat.ops.quant"),
    "a scale in words": (attention(scale="1"), "scale='1' must be a Python number"),
    "a scale for each head": (
        attention(scale=jax.device_put(ones(4))),
        "scale=.* must be a Python number",
    ),
    "a computed scale": (
        lambda: jax.jit(lambda s: attention(scale=s)())(0.1),
        "scale=.* must be a Python number",
    ),
    "labels in halves": (
        lambda: ops.sharpness(X, np.float32(LABELS + 0.5)),
        "labels are token numbers, not float32",
    ),
    "a computed z_loss": (
        lambda: jax.jit(lambda z: cross_entropy(z_loss=z)())(0.1),
        "z_loss=.* must be a Python number",
    ),
    "a computed smoothing": (
        lambda: jax.jit(lambda s: cross_entropy(label_smoothing=s)())(0.1),
        "label_smoothing=.* must be a Python number",
    ),
}


@pytest.mark.parametrize("name", OTHER_TYPES)
def test_other_types_are_refused(name):
    call, message = OTHER_TYPES[name]
    with pytest.raises(TypeError, match=message):
        call()


def test_labels_are_token_numbers():
    with pytest.raises(TypeError, match="labels are token numbers, not float32"):
        cross_entropy(labels=LABELS.astype(np.float32))()


def test_an_activation_is_never_guessed():
    """Names are exact, in lower case, so that none is taken for another."""
    for name in ("SiLU", "gelu_new", "relu^2", ""):
        with pytest.raises(ValueError, match=re.escape(f"activation={name!r} must be one of")):
            mlp(activation=name)()


ONCE = {
    "linear": lambda x, p: ops.linear(x, W, precision=p),
    "norm_linear": lambda x, p: ops.norm_linear(x, NORM, W, precision=p),
    "norm": lambda x, p: ops.norm(x, NORM, precision=p),
    "gated_mlp": lambda x, p: ops.gated_mlp(x, NORM, W, W, DOWN, precision=p),
    "mlp": lambda x, p: ops.mlp(x, NORM, W, DOWN, precision=p),
    "attention": lambda x, p: ops.attention(*[x[:, :, None]] * 3, precision=p),
    "attention_linear": lambda x, p: ops.attention_linear(*[x[:, :, None]] * 3, W, precision=p),
}


LEAN_INT8 = dataclasses.replace(coat.COAT_LEAN, int8_forward=True)


@pytest.mark.parametrize("precision", [coat.COAT_LEAN, LEAN_INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("name", ONCE)
def test_second_derivatives_of_fp8_are_refused(name, precision):
    """Forward over reverse, and reverse over reverse, in any direction of any kind of program."""

    def loss(x):
        return jnp.sum(ONCE[name](x, precision) ** 2)

    def length(x):
        return jnp.sum(jax.grad(loss)(x) ** 2)

    message = rf"coat\.ops\.{name} in FP8 can be differentiated once only.*precision=coat\.BF16"
    for twice in (jax.hessian(loss), jax.grad(length), jax.jit(jax.grad(length))):
        with pytest.raises(TypeError, match=message):
            jax.eval_shape(twice, X)
