"""Images and PDFs: read in processes with limits."""
