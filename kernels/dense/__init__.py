"""Projections and what lies between them."""
