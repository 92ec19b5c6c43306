"""uvicorn with limits: connections, signals, shutdown, watchdog."""
