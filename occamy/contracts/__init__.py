"""What the rooms exchange: records, canonical JSON, digests and sealed manifests. Pure data, no I/O but manifests."""
