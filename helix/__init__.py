"""Helix: exact LLM decoding with the KV cache sharded over many GPUs (helix parallelism)."""
