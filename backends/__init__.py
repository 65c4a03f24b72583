"""Backends run forward passes on a device; base.py has the protocols that each implements."""
