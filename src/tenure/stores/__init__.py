"""Implementations of the contract in `tenure/store.py`."""
