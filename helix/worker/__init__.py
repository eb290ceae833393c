"""Each rank's side of the engine: executes batches on its shard of the model and its part of the KV cache."""
