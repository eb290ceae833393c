"""Attention over a paged cache: decode, prefill, append, and the merge of partial results."""
