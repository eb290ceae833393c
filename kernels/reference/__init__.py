"""The ops of `kernels` in plain torch: the CPU implementation and the oracle of the kernels' tests."""
