"""Communication between ranks: one contract (`base`) and its transports."""
