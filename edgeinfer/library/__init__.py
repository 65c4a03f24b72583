"""Models by name: those in the folders of this machine, and those of the Hugging Face Hub."""
