"""Indexer kernels: select the tokens that an MLA query reads (DeepSeek sparse attention)."""
