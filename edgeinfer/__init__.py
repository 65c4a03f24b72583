"""edgeinfer runs language models on the machine at hand."""
