"""One job: its ranks, their membership, the engine they serve, and reports."""
