"""Six gates between raw task packages and a sealed task release; whatever fails is quarantined with a reason."""
