"""Where an agent acts: the Sandbox protocol and its backends. Nothing here knows tasks, worlds or models."""
