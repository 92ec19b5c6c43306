"""Fuzzing: random inputs for whatever reads what a client or a model's maker has written.

    make fuzz                                        all targets, ten minutes together
    make fuzz FUZZFLAGS="grammars --seconds 60"      one of them
    make fuzz FUZZFLAGS="grammars --replay FILE"     one input

A target is a function of bytes that raises on a bug alone; what is rejected as it should be is none.
Each runs in a process of its own.  The kernel bounds what an input may take of a core and of memory
there, and ends it; the supervisor ends one that waits for ever.  `corpus/` has inputs to begin with,
and those that have found something: the tests replay all of them.
"""
