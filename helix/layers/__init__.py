"""Layers of a decoder, each with its sharding rule beside its parameters."""
