"""Kernels of indexers, which choose the tokens that a query of latent attention reads (DeepSeek sparse attention)."""
