"""What layers keep of sequences, and who has which page."""
