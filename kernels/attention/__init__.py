"""Attention over a paged cache: decode, prefill, append, and the combination of partial results."""
