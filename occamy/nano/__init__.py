"""The small base model of the laptop profile: tokenizer, generic pretraining streams, pretraining, shipped weights."""
