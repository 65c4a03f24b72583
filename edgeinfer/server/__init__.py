"""`edgeinfer serve`: programs talk to models over HTTP, in the dialects of OpenAI, Ollama, Anthropic and llama.cpp.

asyncio moves bytes only: whatever takes long (templates, tokens, grammars, texts) runs in threads (`run.py`).
"""
