"""Weight formats: block layouts, dequantising, quantising, and the packed ternary formats, in plain numpy."""
