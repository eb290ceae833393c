"""Rank 0 of an engine: schedules requests, decides what all ranks launch, and reports tokens."""
