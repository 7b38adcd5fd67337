"""Promises kept while real servers, poolers and networks fail, and after."""
