"""One job: its ranks, their membership, decoding, and what it reports."""
