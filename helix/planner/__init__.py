"""Simulator of decode steps: the time and memory of a step on any hardware, also before it exists.

It models memory traffic, arithmetic, launches and messages. `docs/simulator.md` has its formulas, and a point computed
by hand.
"""
