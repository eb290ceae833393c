"""Benchmarks: `python -m launch.bench WHAT` starts jobs and kernels, and tabulates what they took."""
