"""Layers with a recurrent state per sequence instead of a KV cache."""
