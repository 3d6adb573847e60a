"""The heavy arithmetic: `jnp` references, and the functions that launch Triton kernels.

gemm, int8, int4            matrix products in FP8, INT8, and of FP8 with INT4
grouped, routing            products of rows in groups, each with a weight; tokens sorted by expert
cast                        an array in one FP8 tensor
norm, activation, rotary    the elementwise parts of a layer
tile_attention              attention between tiles of tokens
attention_to_past           attention of one new token to a stored past
adam, stored_moment         a step of AdamW in 8 bits, launched by adam_launch; one moment by itself
moment_format               how a moment is stored, as constants of these kernels
leaf_layout                 which elements of a leaf each program of a kernel works on
dispatch, launch            XLA or Triton; Triton kernels on JAX arrays
sharding, leaf_sharding     kernels on sharded arrays, and in place on an optimizer's leaves
kernel_cache                compiled kernels in files
triton/                     the kernels, imported when the first one is launched
"""
