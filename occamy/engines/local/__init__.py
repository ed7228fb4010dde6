"""A CPU engine for small models: continuous batching, prefix re-use, SGLang's /generate over HTTP on one machine."""
