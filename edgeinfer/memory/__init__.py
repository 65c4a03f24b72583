"""Memory budgets: what a model will take, and whether it fits."""
