"""What rank 0 decides."""
