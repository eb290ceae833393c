"""Memory of sequences: contents by layer, pages, and their owners."""
