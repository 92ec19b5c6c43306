"""Child processes with limits on time and memory."""
