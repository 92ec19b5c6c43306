"""From a prompt to choices: submits, detokenizes, finds stop strings."""
