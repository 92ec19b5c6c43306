"""The images and PDFs of requests: base64, files of clients, and of hosts that the operator lists."""
