"""llama.cpp's own dialect: /completion, /infill, /tokenize, /detokenize, /apply-template, /props and /slots."""
