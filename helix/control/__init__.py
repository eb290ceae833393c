"""The control plane: decisions of rank 0."""
