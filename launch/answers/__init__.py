"""Forms of answers: dialects of model families, grammars, and the token masks that enforce them."""
