"""What the server bears: departures, overload, unfair loads and long runs, with their bounds."""
