"""Projections, and the elementwise operations between them."""
