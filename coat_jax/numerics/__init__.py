"""What 8 bits mean: formats, scales and rounding.

formats             FP8 formats, casts that saturate, stochastic rounding
noise               random numbers, hashed from a key and an element's index
groups              neighbours along the last axis that share a scale
blocks              an array in FP8 with one power of two per block: saved activations
expansion           dynamic range expansion: optimizer moments in FP8
logarithms          second moments as 8-bit logarithms
integers            first moments, over the root of the second, as 8-bit integers
corrections         8 bits that extend a BF16 number to 24
eight_bits          INT8 and FP8 codes that GPUs multiply at inference
four_bits           INT4 codes of weights, in groups
cache_formats       the keys and values that generation stores
statistics          what rounding does to a tensor
minifloat           small floats of any shape, simulated
quantizer           any of these formats with scales of any kind
mesh_axes           the axes over which an array is sharded
explicit_axes       ops on arrays that are sharded over explicit axes
one_program         a function as one compiled program, also outside of `jit`
"""
