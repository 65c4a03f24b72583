"""Speculative decoding: draft trees, verification, costs of passes, and the policy that sizes the trees."""
