"""From messages to prompt tokens: chat templates and their sandbox."""
