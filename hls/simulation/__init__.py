"""The Verilog engine, compiled by Verilator and called from Python."""
