"""What the operating system says of the memory of this process."""
