"""Layers of a decoder, each with the sharding rule of its parameters."""
