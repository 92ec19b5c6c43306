"""CPU kernels in C++, an extension that is built when a compiler is at hand."""
