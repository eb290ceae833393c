"""One job: its ranks, their membership, decoding and serving, and reports."""
