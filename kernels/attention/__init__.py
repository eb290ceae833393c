"""Attention over the paged KV cache: decode, prefill, KV append, and merging of partial states."""
