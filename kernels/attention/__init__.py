"""Attention over the paged KV cache: decode, prefill, KV append, and merging of partial states."""

# Of keys and values dequantized at a time; about 32K tokens of 8 heads x 128, where merging takes 1% of attention.
PIECE_BYTES = 1 << 27
