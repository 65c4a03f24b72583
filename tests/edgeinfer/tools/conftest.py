"""What these tests use; without llguidance those that call a model with tools are skipped."""

from constrained import grammar  # noqa: F401
