"""The images of requests: base64, and files of hosts that the operator lists."""
