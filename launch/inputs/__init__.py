"""User inputs, checked before anything starts."""
