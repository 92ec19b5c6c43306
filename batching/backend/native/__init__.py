"""CPU kernels in C++, an extension that is built when a compiler is at hand.

`native_loader` finds it, `model` puts it into a model, `pools` has what requests keep.  `layers` has the
modules that call it, `fused` what runs several of them as one operation.
"""
