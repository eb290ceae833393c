"""Benchmarks of one kernel, or of one collective, beside what others offer for the same."""
