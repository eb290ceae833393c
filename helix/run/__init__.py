"""What every rank does alike."""
