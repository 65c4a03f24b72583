"""The parts of a tokeniser: pre-tokenisers, vocabulary, special tokens, merging."""
