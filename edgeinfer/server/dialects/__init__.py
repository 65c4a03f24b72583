"""What programs say and expect: one package or module per dialect, all over the same requests (`asked.py`)."""
