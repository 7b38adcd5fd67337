"""Implementations of the contract in `tenure/wakeup.py`."""
