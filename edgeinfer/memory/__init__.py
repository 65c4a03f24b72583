"""Memory plans: the bytes that a model will take, compared with the budget before it loads."""
