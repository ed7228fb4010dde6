"""Held-out evaluation: statistics over tasks, cost from frozen prices, the Pareto front. No training, no tracking."""
