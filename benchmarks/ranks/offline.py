"""Requests that come all at once: how many, how long, and how many tokens each wants."""

K = 1024
OFFLINE_LOADS = (  # requests at once, tokens of each prompt, new ones; the first is what a server meets first
    (4, 2 * K, 16), (4, 2 * K, 16), (1, 32 * K, 1), (1, 128 * K, 1), (8, 32 * K, 128), (64, K, 256), (64, K, 256),
    (16, 8 * K, 256), (256, 512, 128),
)  # fmt: skip
