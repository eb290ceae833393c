"""Block-sparse decode: key bounds of pages, and selection of the pages that a query reads."""
