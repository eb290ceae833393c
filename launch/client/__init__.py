"""The client: from a request body to the text of its answer, without torch, kernels or a model."""
