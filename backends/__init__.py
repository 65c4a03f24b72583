"""Backends run a forward pass on a device; see base.py for what each offers."""
