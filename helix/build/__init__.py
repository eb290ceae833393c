"""Sizes that a config and the memories allow."""
