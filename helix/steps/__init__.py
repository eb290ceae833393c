"""Steps: their tokens, the state of sequences on the device, and sampling."""
