"""What a decode step costs on some hardware, before there is such hardware: a model of memory traffic, arithmetic,
launches and messages. `docs/simulator.md` has its formulas, and a point computed by hand.
"""
