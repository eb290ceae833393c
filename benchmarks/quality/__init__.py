"""Measures approximations (drafts, block selection) and needles, compared with dense attention on the same prompts."""
