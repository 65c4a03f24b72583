"""Boards, and a model of how fast they run a ternary model and what it takes of them. Nothing here is measured."""
