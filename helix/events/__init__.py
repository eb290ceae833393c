"""What happens to sequences: what rank 0 decides, and whom it concerns."""
