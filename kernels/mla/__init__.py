"""Multi-head latent attention (DeepSeek's MLA)."""
