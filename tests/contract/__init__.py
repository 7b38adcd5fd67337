"""What every store must do, whatever database is behind it (src/tenure/store.py)."""
