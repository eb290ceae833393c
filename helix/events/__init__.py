"""Requests, decisions, and the events in the life of sequences."""
