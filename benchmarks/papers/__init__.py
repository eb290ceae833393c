"""Figures, tables and kernels of the papers that the runtime follows, redrawn and rebuilt to compare with."""
