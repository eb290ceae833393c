"""Starting runs: torchrun jobs, sweeps, benchmarks."""
