"""Recorded results, read and shown."""
