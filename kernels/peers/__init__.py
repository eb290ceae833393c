"""Collectives that write directly into the memory of peer GPUs."""
