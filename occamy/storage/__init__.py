"""Where a run keeps its things on disk: the run directory, its stages, its lock and its progress file."""
