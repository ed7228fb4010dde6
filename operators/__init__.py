"""Kubernetes operators. They import `occamy.contracts` and `occamy.sandboxes` only."""
