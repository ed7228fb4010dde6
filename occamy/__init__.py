"""Occamy Pipelines: post-training of cost-efficient co-work agents as declarative workflow-as-code."""

__version__ = "0.1.0"
