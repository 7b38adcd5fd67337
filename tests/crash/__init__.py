"""Promises about processes, proved with real processes and real signals."""
