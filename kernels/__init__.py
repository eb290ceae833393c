"""GPU kernels, one op per file; `kernels.reference` holds the same ops in plain torch, which a CPU runs."""
