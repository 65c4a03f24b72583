"""What is tried out, and may change or go: a device that computes some experts beside the CPU.

It has run on the CPU through PoCL alone, on no GPU. Its sums have another order than the CPU's, so the text may differ
from that without it. It is the one exception to the promise that no optimisation changes the text.
"""
