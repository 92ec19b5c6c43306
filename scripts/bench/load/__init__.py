"""What loads servers over HTTP and measures what their clients see."""
