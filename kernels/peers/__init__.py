"""Kernels that write into the memory of other GPUs."""
