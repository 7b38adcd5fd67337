"""Tenure inside frameworks. Each is imported by its own users only."""
