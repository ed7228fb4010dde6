"""Executable environments: services with databases, a workspace, a deterministic clock, an event log, typed tools."""
