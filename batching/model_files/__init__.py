"""What model files say before they are loaded: headers and configs, no weights."""
