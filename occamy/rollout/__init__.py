"""Runs episodes: schedules many, freezes and fingerprints their worlds, grades them, seals their records."""
