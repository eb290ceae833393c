"""Reads and shows recorded results."""
