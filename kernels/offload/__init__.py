"""A cache in host memory: blocks with a place on the GPU, and copies in both directions."""
