"""Puts the CPU kernels of `kernels/` into a model.

`native_loader` finds them, `model` puts them into a model, `pools` has what requests keep.  `layers` has the
modules that call them, `fused` what runs several of them as one operation.
"""
