"""None: jobs are no models. Django tells of migrations only apps that have this module."""
