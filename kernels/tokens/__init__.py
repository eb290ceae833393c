"""From logits to tokens: sampling, drafts, verification and commit."""
