"""The files of a board: written, read, and looked through for faults."""
