"""Communication between ranks: the `Communicator` interface (`base`) and its backends."""
