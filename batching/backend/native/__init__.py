"""CPU kernels in C++, an extension that is built when a compiler is at hand.

`extension` finds it, `modules` puts it into a model, `cache` is the KV pool that it reads.
"""
