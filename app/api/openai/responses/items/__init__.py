"""Items of input and output, and the tools that they call."""
