"""`tenure demo`: jobs, a killed child, a killed worker, and an account that adds up."""
