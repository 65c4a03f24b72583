"""Logic estimates of the engines by yosys, the engine as its netlist in Icarus, and its clock rate on an ECP5."""
