"""Threads of OpenMP that wait for work sleep: with more threads than cores, one that spins keeps another from its core.

To be imported before llama.cpp and torch, which use it. With two processes of tests, llama.cpp takes a third of the
processor time so. Processes that tests start inherit it.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
