"""What a running system says about itself."""
