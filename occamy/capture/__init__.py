"""The recording proxy: what a model was shown and what it sampled, on token ids. Knows no harness and no training."""
