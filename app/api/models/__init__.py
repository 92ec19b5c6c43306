"""The models of the server: what each is, its state, and for operators its load and unload."""
