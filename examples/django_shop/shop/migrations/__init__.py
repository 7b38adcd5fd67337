"""The shop's tables."""
