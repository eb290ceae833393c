"""Performance simulator: predicts time and memory of decode steps on any hardware.

It models memory traffic, FLOPs, kernel launches and messages.
`docs/simulator.md` has the formulas, and a point computed by hand.
"""
