"""KV offload: a cache in host memory, blocks resident on the GPU, and copies in both directions."""
