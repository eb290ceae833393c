"""The front end of a server: a separate process without torch that speaks HTTP to clients and frames to rank 0."""
