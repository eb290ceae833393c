"""Routed experts (MoE)."""
