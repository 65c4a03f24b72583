"""The page at /: one file, which loads nothing from elsewhere."""
