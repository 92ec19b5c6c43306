"""SQLite and files: stored responses, uploads, batches."""
