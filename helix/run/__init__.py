"""Execution of decisions, which every rank does alike."""
