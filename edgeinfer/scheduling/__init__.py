"""Many texts at once: what a caller wants, texts that run, and the loop that runs them."""
