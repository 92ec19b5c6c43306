"""Endurance tests of a live server: departures, overload, unfair loads, long runs; with bounds."""
