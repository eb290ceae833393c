"""Inputs of the user, checked before anything starts."""
