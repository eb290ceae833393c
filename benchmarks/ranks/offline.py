"""Offline throughput loads: requests that arrive at once, their prompt lengths and output tokens."""

K = 1024
OFFLINE_LOADS = (  # requests, prompt tokens, output tokens; the first load is the first that a server gets
    (4, 2 * K, 16), (4, 2 * K, 16), (1, 32 * K, 1), (1, 128 * K, 1), (8, 32 * K, 128), (64, K, 256), (64, K, 256),
    (16, 8 * K, 256), (256, 512, 128),
)  # fmt: skip
