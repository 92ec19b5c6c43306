"""The page at `/`: static files, which call the APIs as any other client does."""
