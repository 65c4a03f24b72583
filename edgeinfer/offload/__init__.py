"""Decisions about experts that are read from disk: which stay in memory, how many, and which are read ahead.

All of it is pure code: it gets measurements and returns decisions. The native engine moves the bytes.
"""
