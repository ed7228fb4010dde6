"""The Kubernetes backend: leases of the sandbox operator, and the agent that runs commands in their pods.

`agent` and `http` run in the pod as well: standard library only.
"""
