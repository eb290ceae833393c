"""What the ranks of a job time."""
