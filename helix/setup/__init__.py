"""Builds an engine from a config, sized to fit GPU and host memory."""
