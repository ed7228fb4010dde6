"""Writes executable task contracts: programmatic authors by two routes, variants, sealed raw packages."""
