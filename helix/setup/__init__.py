"""Construction of an engine, in sizes that a config and the memories allow."""
