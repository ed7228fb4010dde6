"""Merging of checkpoints that share a root: averages of weights, streamed tensor by tensor."""
