"""Orders that are charged and confirmed by background jobs."""
