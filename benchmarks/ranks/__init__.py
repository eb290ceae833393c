"""Measurements inside the ranks of a job, by `bench.kind`."""
