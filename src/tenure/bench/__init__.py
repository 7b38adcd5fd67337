"""`tenure bench`: what the product costs, each figure beside a raw SQL loop of the same run."""
