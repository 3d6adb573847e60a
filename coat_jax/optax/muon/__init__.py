"""Muon: the momentum of each matrix, orthogonalized."""
