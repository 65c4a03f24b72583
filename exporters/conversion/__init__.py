"""What the conversion of all architectures of Hugging Face to GGUF shares: names, rows, rotation, keys, checks."""
