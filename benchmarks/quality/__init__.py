"""Measurements of approximations: drafts, chosen blocks and needles, beside dense attention on the same prompts."""
