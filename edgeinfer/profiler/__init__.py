"""What a model takes and how fast it will be, before it is loaded: the table, what fits, and the check of both."""
