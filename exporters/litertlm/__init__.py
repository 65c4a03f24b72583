"""Export to one .litertlm file, which Google's LiteRT-LM runtime runs on phones, in browsers and on PCs."""
