"""States of any optimizer: which leaf is what, where it is, and how it is saved."""
