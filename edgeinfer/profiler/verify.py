"""A model loaded in a process of its own, its context filled: what it takes and how fast it is, against the profile."""

from __future__ import annotations
