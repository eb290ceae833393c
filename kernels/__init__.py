"""GPU kernels, one op per file; each family's `reference.py` has the same ops in plain torch."""
