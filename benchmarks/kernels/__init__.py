"""Benchmarks of single kernels and collectives, compared with other libraries."""
