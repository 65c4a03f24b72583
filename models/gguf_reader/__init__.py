"""Reading GGUF files strictly; edgeinfer.models.gguf has what the rest of the package uses."""
