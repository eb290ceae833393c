"""Benchmarks of whole models: each starts jobs and tabulates what their ranks measured."""
