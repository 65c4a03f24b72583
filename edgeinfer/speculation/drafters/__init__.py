"""Drafters, one file each. A drafter changes the speed and never the text."""
