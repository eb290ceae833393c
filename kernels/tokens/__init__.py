"""From logits to tokens: sampling, drafts, verification, commit."""
