"""Attention policies: which keys queries read."""
