"""Batch jobs: requests of a JSON Lines file, answered several at once, in a file that a later run goes on with."""
