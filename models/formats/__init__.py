"""Weight formats in numpy: block layouts, dequantisation, quantisation and the packed ternary formats."""
