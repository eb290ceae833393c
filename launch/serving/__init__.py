"""The HTTP server: a process without torch that speaks HTTP to clients and frames to rank 0."""
