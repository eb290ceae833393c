"""The ops of `kernels` in plain torch: the CPU implementation, and what the kernels are compared with."""
