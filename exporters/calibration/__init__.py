"""Texts, importance matrices and passes of the native engine over them."""
