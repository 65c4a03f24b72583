"""Checks of what was written against its source."""
