"""Ollama's dialect: /api/version, tags, show, ps, chat and generate. Nothing is pulled, made or deleted."""
