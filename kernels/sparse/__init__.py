"""Block-sparse decode: key bounds of pages, and the selection of pages that a query reads."""
