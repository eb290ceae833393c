"""Formats of answers: chat formats of model families, grammars, and the token masks that enforce them."""
