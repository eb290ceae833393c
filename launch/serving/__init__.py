"""The front end of a server: a process of its own, without torch, that speaks HTTP to clients and frames to rank 0."""
