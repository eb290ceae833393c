"""Block-sparse decode: what stands for a page, and which pages a query reads."""
