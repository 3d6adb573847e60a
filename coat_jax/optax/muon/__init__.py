"""Muon: the momentum of each matrix, orthogonalized.

matrices         which parameters are matrices, and along which axes
newton_schulz    orthogonalizes matrices, each on one device of the mesh
transformation   `fp8_muon`, with AdamW for what is not a matrix
"""
