"""Engines: a client of the SGLang wire contract and a local CPU engine that speaks it. Only `local` imports torch."""
