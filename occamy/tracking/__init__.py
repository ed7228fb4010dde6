"""MLflow: one flat run per candidate, nested detail per stage, the registry and promotion. Imported lazily."""
