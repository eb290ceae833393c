"""Attention policies: the choice of keys that queries read."""
