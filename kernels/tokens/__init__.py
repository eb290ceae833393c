"""Sampling, drafts, verification and commit: the way from logits to tokens."""
