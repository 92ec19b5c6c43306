"""What has to be right."""
