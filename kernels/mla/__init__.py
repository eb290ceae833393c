"""Attention over latents (DeepSeek's MLA)."""
