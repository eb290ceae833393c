"""Layers that keep a state of a sequence in place of its tokens."""
