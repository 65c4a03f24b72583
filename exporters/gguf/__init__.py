"""Export to GGUF: types, layout, and writing that can be resumed."""
