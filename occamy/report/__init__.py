"""The report of a run: one self-contained HTML page, built from manifests, cards, figures and sealed episodes only."""
