"""GPU kernels, one op a file; `kernels.reference` holds the same ops in plain torch, which is what a CPU runs."""
