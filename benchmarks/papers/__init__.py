"""Reproduces figures, tables and kernels of the papers behind the runtime, for comparison."""
