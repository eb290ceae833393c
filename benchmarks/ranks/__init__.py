"""Measurements inside the ranks of a job, selected by `bench.kind`."""
