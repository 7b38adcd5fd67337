"""What operators do, on every store and not through the command line."""
