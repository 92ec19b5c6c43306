"""What `doctor` finds, on machines that lack something."""
