"""Ternary products for FPGAs: the formats that boards read, the hardware in C++ and Verilog, and what simulates it."""
