"""What the command line, the bench and the demo print with: tables, colours, a live line."""
