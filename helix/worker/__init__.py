"""Work of every rank alike: the execution of decisions on its part of the model and of the cache."""
