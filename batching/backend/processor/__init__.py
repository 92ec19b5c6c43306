"""What the processor has, and how much of it may be used."""
