"""Agent runtimes: what the model sees, how tools are called, when history is rewritten. Knows no tasks or grades."""
