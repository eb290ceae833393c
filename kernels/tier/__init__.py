"""A cache in host memory: which of its blocks have a place on the GPU, and how they come and go."""
