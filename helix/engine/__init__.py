"""Rank 0's side of the engine: schedules requests, decides what all ranks launch, and reports tokens."""
