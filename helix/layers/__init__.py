"""Decoder layers; each declares how its parameters are sharded."""
