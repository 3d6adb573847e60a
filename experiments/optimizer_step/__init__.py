"""How long one step of an optimizer takes, and what memory it needs beyond parameters and state.

adamw       AdamW with 8-bit moments, in one pass and in place, moves fewer bytes than AdamW with
            FP32 moments, is faster and allocates nothing. Against optax, torch, torchao and
            bitsandbytes, on one array and on the arrays of Llama-2-7B. "24 bits" are BF16
            parameters with corrections.
muon        `coat.optax.fp8_muon` takes at most 1.3 times as long as its Newton-Schulz products,
            on one GPU and on several, which all share the step: matrices are sharded by rows

Every case runs in a process of its own, all on the same device. Parameters and gradients are
random. JAX optimizers get BF16 gradients; torch's take gradients in the parameters' dtype only, so
ours is also measured with those. "extra" is what a step allocates: XLA's temporary buffers, or the
rise of torch's allocator.
"""
