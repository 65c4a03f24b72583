"""Drafts, their check, and how much of them pays: several tokens from one forward pass, and the same text always."""
