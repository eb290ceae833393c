"""GPU kernels, one op per file; each family's `reference.py` holds the same ops in plain torch."""
