"""Muon: the momentum of each matrix, orthogonalized.

matrices         which parameters are matrices, and along which axes
newton_schulz    orthogonalizes matrices, each on one device of the mesh
transformation   `scale_by_fp8_muon`; and `fp8_muon`, with AdamW for what is not a matrix
"""
