"""What ends a run, or might: signals, exceptions, values that are not finite, ranks that differ."""
