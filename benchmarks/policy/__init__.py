"""Replacement policies of a hot region, as far as they decide what misses."""
