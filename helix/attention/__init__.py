"""Attention policies: which keys a query reads."""
